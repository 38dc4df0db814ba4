"""docs/starter.ipynb runs from its first to its last cell, and what is committed of it is clean.

`pytest -n 0 tests/test_notebook.py --basetemp new` leaves it with new outputs in a folder of new/.
"""

import json
import os
import re

import pytest
from conftest import REPOSITORY

NOTEBOOK = REPOSITORY / "docs" / "starter.ipynb"


@pytest.mark.slow
def test_notebook_runs_and_draws_two_pictures(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    import nbformat

    for name in ("starter.py", "support"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    client = nbclient.NotebookClient(
        nbformat.read(NOTEBOOK, as_version=4),
        resources={"metadata": {"path": str(tmp_path)}},
        coalesce_streams=True,
        record_timing=False,
    )
    # A cell that fails raises. Warnings are left out, since they name files of the machine.
    notebook = client.execute(env=os.environ | {"PYTHONWARNINGS": "ignore"})
    assert json.dumps(notebook).count('"image/png"') == 2
    nbformat.write(notebook, tmp_path / "starter.ipynb")


def test_committed_notebook_has_no_errors_paths_or_dead_links():
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            for target in re.findall(r"\]\(([^)#]+)", "".join(cell["source"])):
                assert (NOTEBOOK.parent / target).exists(), target
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error", output
            printed = "".join(output.get("text") or output["data"]["text/plain"])
            assert not re.search(r"(^|[\s'\"(=])(~?/|[A-Z]:\\)\w", printed, flags=re.M)
