"""A program of facts, asked of the compiler of another machine. Not a test.

What it would print stands in the assembly that the compiler makes of it: nothing has to run. That
is how Linux finds its own offsets (asm-offsets).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["printed", "require_cross"]

COMPILER = "aarch64-linux-gnu-gcc"
PACKAGES = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
_PRINTF = """
#define PICK(a, b, name, ...) name
#define ONE(text, a) asm volatile("\\n#FACT " text : : "i"(a));
#define TWO(text, a, b) asm volatile("\\n#FACT " text : : "i"(a), "i"(b));
#define printf(text, ...) PICK(__VA_ARGS__, TWO, ONE)(text, __VA_ARGS__)
int main(void) {"""


def require_cross(header: str) -> None:
    """Skip where the compiler, or a header, which is the same on all machines, is missing."""
    if shutil.which(COMPILER) is None or not Path("/usr/include", header).exists():
        pytest.skip(f"not here: {COMPILER} or <{header}>; apt install {PACKAGES}")


def printed(folder: Path, program: str, *, skips: bool = False) -> str:
    """Return what a program of printf() with two constants each at most would print on aarch64.

    Args:
        folder: for files.
        program: in C.
        skips: leave lines out that do not compile: the headers are older than they.
    """
    for name in ("infiniband", "rdma"):  # no other header of this machine's
        if Path("/usr/include", name).exists() and not (folder / name).exists():
            (folder / name).symlink_to(Path("/usr/include", name))
    program = program.replace("int main(void) {", _PRINTF)
    lines = [_with_operands(line) for line in program.split("\n")]
    source, assembly = folder / "cross.c", folder / "cross.s"
    while True:
        source.write_text("\n".join(lines))
        done = subprocess.run(
            [COMPILER, "-w", "-O1", "-S", "-I", folder, source, "-o", assembly],
            capture_output=True,
            text=True,
            check=False,
        )
        if not done.returncode:
            break
        wrong = {int(at) - 1 for at in re.findall(r"cross\.c:(\d+):\d+: error", done.stderr)}
        assert skips, done.stderr[:2000]
        assert any(lines[at] for at in wrong), done.stderr[:2000]
        for at in wrong:
            lines[at] = ""
    found = re.findall(r"^#FACT (.*)$", assembly.read_text(), re.MULTILINE)
    return "".join(f"{line}\n" for line in found)


def _with_operands(line: str) -> str:
    """The formats of a line as operands of asm: the first is %c0, the second %c1."""
    count = iter(("%c0", "%c1"))
    return re.sub(r"%(?:zu|llu|lld)", lambda _: next(count), line).replace('\\n"', '"')
