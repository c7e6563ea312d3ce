"""The notebooks run from top to bottom, show pictures, and leave nothing behind."""

from __future__ import annotations

import resource
import runpy
from pathlib import Path

import nbclient
import nbformat
import pytest

CPU_S_MAX = 180.0
"""Seven times what the longest takes: it holds the order of magnitude on any machine."""

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cpu_s() -> float:
    """Return the CPU time of ended processes; wall time would depend on the machine's load."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the kernel's own dependencies
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    """A notebook that fails on a fresh checkout teaches that tep does not work."""
    book = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        book, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )

    before_s = cpu_s()
    client.execute()

    assert cpu_s() - before_s < CPU_S_MAX
    assert [] == list(tmp_path.iterdir()), "left in the working directory"
    outputs = [out for cell in book.cells for out in cell.get("outputs", [])]
    pictures = sum("image/png" in out.get("data", {}) for out in outputs)
    shown = runpy.run_path(str(ROOT / "scripts" / "draw_figures.py"))["NOTEBOOKS"]
    assert pictures >= max(shown.get(path.stem, {"": 1}).values()), "the documentation shows it"
    ran = [cell.execution_count for cell in book.cells if cell.cell_type == "code"]
    assert list(range(1, len(ran) + 1)) == ran
