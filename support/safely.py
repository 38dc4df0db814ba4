"""What looks on never ends a run."""

import traceback
from pathlib import Path

import starter


def safely(what, function, *arguments):
    """Calls what looks on. It never ends a run: its exception becomes a line. Returns whether it
    ended well."""
    try:
        function(*arguments)
    except starter.RunStopped:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}, line {last.lineno}"
        print(f"{what} ends here: {error!r:.200} ({place}); the run goes on without it")
        return False
    return True


def write_whole(path, data):
    """Writes a small file, which gets its name when it is whole: a full disk leaves that before."""
    unfinished = path.with_name(f"unfinished_{path.name}")
    try:
        unfinished.write_bytes(data)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.replace(path)
