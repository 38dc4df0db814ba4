"""Several processes for starter.py: `torchrun --nproc_per_node=N starter.py` starts them.

They do the same, but for their share of the prompts and rows (support/divided.py); the first one
scores and writes. All of them hold all responses of a step, so that groups and the weights of the
loss are those of one process. After Ctrl-C torchrun waits 30 s for the end of the step, the
checkpoint and the report; with `torchrun --shutdown-timeout 600` longer.
"""

import atexit
import contextlib
import datetime
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import starter
from support import watch

WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))
LAST_WORDS = []  # of this process, if it is one of several

if RANK:  # the first process speaks for all
    sys.stdout = open(os.devnull, "w", encoding="utf-8")


def connect(cfg):
    """Connects the processes, and gives this one its GPU. Comes before all that may differ between
    machines: where one process fails, its connections close, and the others end too. Raises
    InputError where machines without a disk in common see other states of a run to resume."""
    if cfg.vllm_tp >= 1 and WORLD % cfg.vllm_tp:
        raise starter.InputError(
            f"vllm_tp = {cfg.vllm_tp} needs a multiple of {cfg.vllm_tp} processes, and this is one "
            f"of {WORLD}; type torchrun --nproc_per_node={cfg.vllm_tp}, or leave vllm_tp out"
        )
    if WORLD == 1:
        return
    on_gpu = "cuda" in str(cfg.device) or (cfg.device == "auto" and torch.cuda.is_available())
    if on_gpu:
        cfg.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(cfg.device)
    if not dist.is_initialized():
        longest_wait = datetime.timedelta(hours=1)  # for a reward, or for who writes the model
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=longest_wait)
        LAST_WORDS.append(LastWords())
        # Gloo's threads need the interpreter once more: one that is late to release a tensor would
        # find none, and abort a finished run.
        atexit.register(time.sleep, 0.5)
        if on_gpu:
            atexit.register(dist.destroy_process_group)
    if cfg.resume:
        seen = dict(gather([(f"{socket.gethostname()}, process {RANK}", what_is_there(cfg))]))
        if len(set(seen.values())) > 1:
            raise starter.InputError(
                f"resume: each machine needs the same newest checkpoint, and they see {seen}; copy "
                "the run's folders of all machines together, to the same place on each"
            )


def what_is_there(cfg):
    """Returns the newest checkpoint of the run to resume, as this machine sees it."""
    try:
        folder = starter.folder_of_run(cfg)
    except starter.InputError:
        return "no such folder"
    newest = max(folder.glob("checkpoint_*"), default=None)
    if newest is None:
        return f"no checkpoint in {folder}"
    return f"{newest}, {len([*newest.glob('*')])} parts" if newest.is_dir() else str(newest)


def join(run):
    """The first process writes, and gives the folder."""
    device = run.cfg.device
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    run.writes_files = RANK == 0
    run.folder = gather([run.folder])[0]


def gather(items):
    """Returns the lists of all processes as one list, when all of them have come here."""
    if WORLD == 1:
        return items
    parts = [None] * WORLD
    dist.all_gather_object(parts, items)
    return sum(parts, [])


def share_of(items, n_together):
    """Returns those of this process, which stand together. n_together: processes that have the same
    share, since they run one engine."""
    n = -(-len(items) * n_together // WORLD)
    first = RANK // n_together * n
    return items[first : first + n]


@functools.cache
def engine_group(n_together):
    return dist.new_subgroups(n_together)[0]


def for_engine(value, n_together):
    """Returns the value of the first of those processes that run one engine, in each of them."""
    if n_together == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, group=engine_group(n_together), group_src=0)
    return values[0]


# 2. The end of all, where one process ends.

PULSE = 5.0  # seconds between two signs of life
PATIENCE = 40.0  # seconds without one, after which a process is given up


class OfTheFirst(RuntimeError):
    """In the other processes: an error that the first one has raised, too."""

    is_of_all = True


class LastWords:
    """Starts support/watch.py beside this process, and tells it, and so the others, how this
    process ends."""

    def __init__(self):
        self.store = watch.store_of_all()
        self.before = sys.excepthook
        sys.excepthook = self.say_why
        atexit.register(self.end)
        numbers = [str(x) for x in (RANK, WORLD, os.getpid(), PULSE, PATIENCE)]
        self.watch = subprocess.Popen([sys.executable, "-P", watch.__file__, *numbers])

    def end(self):
        self.tell(f"alive/{RANK}", "done")
        self.watch.kill()  # before the store ends

    def tell(self, key, value):
        with contextlib.suppress(RuntimeError):  # the machine that has the store has ended
            self.store.set(key, value)

    def say_why(self, kind, error, trace):
        """Handles an exception that ends this process. What is of another process that has ended
        before is said in a line."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, which would cut it short
        is_of_another = re.search("gloo|nccl|Connection (closed|reset)", str(error), re.IGNORECASE)
        if not is_of_another and kind is not OfTheFirst:
            self.before(kind, error, trace)
            self.tell("failed", f"process {RANK} has failed: {error!r:.500}")
            return
        reason = ""
        with contextlib.suppress(RuntimeError):
            until = time.monotonic() + 2 * PULSE
            while not reason and time.monotonic() < until:  # its watch may not have seen it yet
                time.sleep(PULSE / 10)
                reason = self.store.check(["failed"]) and self.store.get("failed").decode()
        if not reason:
            self.before(kind, error, trace)
            reason = "another one has ended; what it has said stands above"
        print(f"process {RANK} ends: {reason}", file=sys.stderr, flush=True)
