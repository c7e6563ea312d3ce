"""Requests from files, and prefixes that prefillers still have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tep import UsageError
from tep.apps.kvcache.simulate import Load, Plant, simulate
from tep.apps.kvcache.traces import SYNTHETIC, Arrival, read_trace
from tep.apps.kvcache.ttft import PUBLISHED

# Made up, in the form of the published lines.
LINES = [
    {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]},
    {"timestamp": 1000, "input_length": 512, "output_length": 0, "hash_ids": [7]},
]
BARE = Plant(prefillers=1, decoders=1, prefill_tp=1, decode_tp=1)
ALONE = replace(BARE, prefix_tokens=1 << 20)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_both_forms_say_the_same(tmp_path: Path) -> None:
    """A trace that is read in another unit makes another load, and nobody notices."""
    jsonl = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, LINES)) + "\n\n")
    table = "at_s,input_length,output_length,hash_ids\n4.5,600,5,7 9\n2.5,512,0,7\n"
    expected = [Arrival(0.0, 512, 1, (7,)), Arrival(2.0, 600, 5, (7, 9))]

    assert expected == read_trace(jsonl)
    assert expected == read_trace(written(tmp_path / "a.csv", table))
    bare = written(tmp_path / "b.csv", "at_s,input_length,output_length\n0,9,3\n")
    assert [Arrival(0.0, 9, 3)] == read_trace(bare)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.txt", "", r"\.jsonl or \.csv is asked for, or 'synthetic'"),
        ("a.jsonl", "", "it has no request"),
        ("a.jsonl", "[1]\n", "request 1: Expected `object`"),
        ("a.jsonl", '{"timestamp": 1', "request 1"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 5}', "request 1: .*output_length"),
        ("a.jsonl", '{"input_length": 5, "output_length": 5}', "request 1: .*timestamp"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 0, "output_length": 5}', "1: .* >= 1"),
        ("a.csv", "input_length,output_length\n5,5\n", "request 1: a time"),
        ("a.csv", "at_s,input_length,output_length,hash_ids\n0,600,5,7\n", "or 2 for 600 tokens"),
        (
            "a.csv",
            "at_s,input_length,output_length,hash_ids\n0,600,5,x y\n",
            "request 1: .*hash_ids",
        ),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, name: str, text: str, why: str) -> None:
    """A line that is left out in silence makes the load lighter than it was."""
    with pytest.raises(UsageError, match=why):
        read_trace(written(tmp_path / name, text))
    with pytest.raises(UsageError, match="No such file"):
        read_trace(tmp_path / "none.csv")


def test_the_shipped_trace_is_one() -> None:
    """The first command that a reader of the docs tries must have something to play."""
    found = read_trace(SYNTHETIC)

    assert 110 == len(found)
    assert 0.0 == found[0].at_s < found[-1].at_s
    assert len({one.blocks[0] for one in found}) < 5, "prompts begin alike"


@pytest.mark.slow
def test_what_a_prefiller_has_is_not_computed_again() -> None:
    """Prefix hits are most of what a trace is played for."""
    first, same = (Arrival(at_s, 4096, 1, tuple(range(8))) for at_s in (0.0, 9.0))
    longer = Arrival(18.0, 6144, 1, (*range(8), 20, 21, 22, 23))
    found = simulate(ALONE, Load(arrivals=(first, same, longer)))

    assert [4095 + 4096, 3 * 4096 + 2048] == [found.tokens_found, found.tokens]
    whole_s, again_s, rest_s = found.compute_s
    assert whole_s == pytest.approx(PUBLISHED.compute_s(4096))
    assert again_s == pytest.approx(94 * PUBLISHED.layer_compute_s(4095, 1))
    assert rest_s == pytest.approx(94 * PUBLISHED.layer_compute_s(4096, 2048))
    times = [done.ttft_s for done in found.completions]
    assert times[1] < times[2] < times[0]


@pytest.mark.slow
def test_a_cache_keeps_the_beginnings_of_what_came_last() -> None:
    """One that forgot nothing would promise hits that no memory holds."""
    plant = replace(BARE, prefix_tokens=4 * 512)
    blocks = ((1, 2), (3, 4, 5), (1, 2), (3, 4, 5))
    load = Load(arrivals=[Arrival(9.0 * k, 512 * len(ids), 1, ids) for k, ids in enumerate(blocks)])
    found = simulate(plant, load)

    # Of 1, 2 the second is given up for 3, 4, 5; then of these the last.
    assert 512 + 1024 == found.tokens_found
    assert 0 == simulate(BARE, load).tokens_found
