"""Requests from a file: when each comes, its lengths, and the blocks that its prompt is made of.

Two forms, told apart by the file's name. `.jsonl` is Mooncake's: a line a request with `timestamp`
(ms), `input_length`, `output_length` and `hash_ids`, one for each 512 tokens of the prompt; equal
ids are equal beginnings (arXiv 2407.00079; github.com/kvcache-ai/Mooncake, FAST25-release/traces).
`.csv` has the columns at_s, input_length, output_length and, if there are any, hash_ids, with
spaces between them. `synthetic.jsonl` ships with the package: conversations that were made up.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from tep import UsageError

__all__ = ["BLOCK_TOKENS", "SYNTHETIC", "Arrival", "read_trace"]

BLOCK_TOKENS: Final = 512
"""Tokens of a block; quoted: Mooncake's traces."""

SYNTHETIC: Final = "synthetic"
"""The name of the trace that ships with the package."""

_MS: Final = 1e-3


class Arrival(NamedTuple):
    """One request: when it comes, tokens of its prompt, and how many are wanted.

    `blocks` are ids of the prompt's blocks of BLOCK_TOKENS; none: it shares nothing.
    """

    at_s: float
    ntokens: int
    max_tokens: int = 16
    blocks: tuple[int, ...] = ()


def read_trace(path: str | Path) -> list[Arrival]:
    """Read a trace, by the order of arrival; the first request comes at 0.

    Raises:
        UsageError: it cannot be read, has no request, or a line that is none; names the line.
    """
    if str(path) == SYNTHETIC:
        with as_file(files("tep.apps.kvcache").joinpath("synthetic.jsonl")) as shipped:
            return read_trace(shipped)
    path = Path(path)
    read = {".jsonl": _mooncake, ".csv": _table}.get(path.suffix)
    if read is None:
        raise UsageError(f"trace {path}: .jsonl or .csv is asked for, or {SYNTHETIC!r}")
    found: list[Arrival] = []
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            found.extend(map(_arrival, read(lines)))
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(f"trace {path}: request {len(found) + 1}: {error}") from error
    if not found:
        raise UsageError(f"trace {path}: it has no request")
    found.sort(key=lambda one: one.at_s)
    return [one._replace(at_s=one.at_s - found[0].at_s) for one in found]


class _Line(msgspec.Struct):
    timestamp: float
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _mooncake(lines: Iterable[str]) -> Iterator[object]:
    return (json.loads(line) for line in lines if line.strip())


def _table(lines: Iterable[str]) -> Iterator[object]:
    for row in csv.DictReader(lines):
        ids = (row.get("hash_ids") or "").split()
        yield row | {"timestamp": float(row.get("at_s") or "nan") / _MS, "hash_ids": ids}


def _arrival(values: object) -> Arrival:
    one = msgspec.convert(values, _Line, strict=False)
    needed = -(-one.input_length // BLOCK_TOKENS)
    if not math.isfinite(one.timestamp) or len(one.hash_ids) not in {0, needed}:
        raise ValueError(
            f"a time, and no hash_ids or {needed} for {one.input_length} tokens are asked for, not "
            f"{values}"
        )
    at_s = _MS * one.timestamp
    return Arrival(at_s, one.input_length, max(1, one.output_length), one.hash_ids)
