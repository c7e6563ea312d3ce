"""Processes of one job, a rank each: started, and seen to their end. Not a test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Ended", "outcomes", "start_rank", "start_ranks"]

Ended = tuple[int, str, str]
"""Exit status, output and errors of a process."""


def start_rank(
    *arguments: object, env: Mapping[str, str] | None = None, fds: Iterable[int] = ()
) -> subprocess.Popen[str]:
    """This Python with these arguments, which keeps the descriptors `fds`."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=tuple(fds),
        text=True,
    )


def start_ranks(
    size: int, port: int, *arguments: object, fds: Iterable[int] = ()
) -> list[subprocess.Popen[str]]:
    """All ranks of a job; torchrun's variables say to each which it is."""
    env = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TEP_TOKEN": "a secret of this test",
    }
    return [start_rank(*arguments, env=env | {"RANK": str(rank)}, fds=fds) for rank in range(size)]


def outcomes(ranks: Sequence[subprocess.Popen[str]], timeout_s: float = 120.0) -> list[Ended]:
    """How each ended; none is left behind, whatever happens."""
    try:
        said = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]
