"""The notebooks run from top to bottom on the simulator."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the kernel's own dependencies
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    """A notebook that fails on a fresh checkout teaches that tep does not work."""
    book = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        book, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )

    client.execute()

    ran = [cell.execution_count for cell in book.cells if cell.cell_type == "code"]
    assert list(range(1, len(ran) + 1)) == ran
