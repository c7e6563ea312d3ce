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
from collections.abc import Iterator, Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final, NamedTuple

from tep import UsageError

__all__ = ["BLOCK_TOKENS", "SYNTHETIC", "Arrival", "read_trace"]

BLOCK_TOKENS: Final = 512
"""Tokens of a block; quoted: Mooncake's traces."""

SYNTHETIC: Final = "synthetic"
"""The name of the trace that ships with the package."""

_MS: Final = 1e-3


class Arrival(NamedTuple):
    """One request.

    Attributes:
        at_s: when it comes.
        ntokens: of its prompt.
        max_tokens: wanted.
        blocks: ids of the prompt's blocks of BLOCK_TOKENS; none: it shares nothing.
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
            for number, values in enumerate(read(lines), 1):
                found.append(_arrival(values, f"trace {path}: request {number}"))
    except (OSError, ValueError) as error:
        where = f"trace {path}: behind request {len(found)}"
        raise UsageError(f"{where}: {error}") from error
    if not found:
        raise UsageError(f"trace {path}: it has no request")
    found.sort(key=lambda one: one.at_s)
    return [one._replace(at_s=one.at_s - found[0].at_s) for one in found]


def _mooncake(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        if line.strip():
            values = json.loads(line)
            if not isinstance(values, dict):
                raise ValueError(f"{values!r} is no object")
            yield {"at_s": _MS * values.get("timestamp", math.nan), **values}


def _table(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    for row in csv.DictReader(lines):
        ids = (row.get("hash_ids") or "").split()
        yield {**row, "hash_ids": [int(one) for one in ids]}


def _arrival(values: Mapping[str, Any], where: str) -> Arrival:
    try:
        at_s, ntokens = float(values["at_s"]), int(values["input_length"])
        wanted, blocks = int(values["output_length"]), tuple(values.get("hash_ids") or ())
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{where}: {error!r} in {dict(values)}") from error
    needed = -(-ntokens // BLOCK_TOKENS)
    sound = math.isfinite(at_s) and ntokens > 0 and all(isinstance(one, int) for one in blocks)
    if not sound or (blocks and len(blocks) != needed):
        raise UsageError(
            f"{where}: a time, a prompt of 1 token or more, and no hash_ids or {needed} for "
            f"{ntokens} tokens are asked for, not {dict(values)}"
        )
    return Arrival(at_s, ntokens, max(1, wanted), blocks)
