"""notebooks/examples, in small: they run, and what they show follows from their numbers."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tep.sim import load_profile

FOLDER = Path(__file__).resolve().parents[2] / "notebooks" / "examples"
LINES_MAX = 150


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_each_is_short_and_listed() -> None:
    """A program that no page lists is found by nobody."""
    page = (FOLDER.parents[1] / "docs" / "examples.md").read_text("utf-8")
    programs = sorted(FOLDER.glob("*.py"))

    assert 6 == len(programs)
    for path in programs:
        text = path.read_text("utf-8")
        assert text.count("\n") <= LINES_MAX, path.name
        assert f"| {path.stem} |" in page
        assert f"examples/{path.name}" in page
        assert "Measures: " in text
        assert "Leaves out: " in text or "leaves out" in text.lower()


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("prefix_kv_many_tiers", ["--pages", "256"], "all at once, compressed"),
        ("collectives_1024_ranks", ["--ranks", "8", "--kib", "1"], "ring"),
        ("cxl_shared_memory", ["--trips", "1"], "CXL pool"),
        ("variable_length_data_parallelism", ["--ranks", "4", "--sequences", "8"], "split_long"),
        ("kv_and_module_migration", ["--requests", "2", "--layers", "1"], "weights there"),
        ("multi_gpu_tax", ["--ranks", "4", "--tiles", "4"], "tax"),
    ],
)
def test_each_prints_its_table(name, words, said, capsys) -> None:
    """A program that does not run any more."""
    assert 0 == example(name).main(words)
    assert said in capsys.readouterr().out


def test_tiers_are_as_fast_as_the_slowest_of_them_allows() -> None:
    """A tier that answers faster than its own rate, or tiers that wait for one another."""
    program = example("prefix_kv_many_tiers")
    in_turn, at_once, compressed = program.measure(512).values()
    alone_us = [
        1e6 * (t.delay_s + t.share * 512 * program.PAGE_BYTES / t.bytes_s) for t in program.TIERS
    ]

    assert max(alone_us) < at_once < 1.2 * max(alone_us)
    assert sum(alone_us) < in_turn < 1.2 * sum(alone_us)
    assert compressed < at_once


@pytest.mark.parametrize("way", ["direct", "doubling", "ring"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_each_all_gather_brings_all_bytes(way, ranks) -> None:
    """An algorithm that is fast because it leaves blocks out."""
    program = example("collectives_1024_ranks")
    took_us = program.gather(way, ranks, 1000, check=True)
    steps = {"direct": 1, "doubling": math.log2(ranks), "ring": ranks - 1}[way]

    assert took_us >= program.bound(ranks, 1000)
    assert took_us >= steps * load_profile("cx7_400").latency_ps / 1e6


def test_shared_memory_wins_where_latency_counts_and_loses_where_bandwidth_does() -> None:
    """A profile whose numbers do not reach the fabric."""
    program = example("cxl_shared_memory")
    found = program.measure(1)
    pool = program.cxl_pool()

    assert found["CXL pool"][8] < found["ConnectX-7"][8] < found["EFA, 2 NICs"][8]
    assert found["CXL pool"][32 << 20] > found["EFA, 2 NICs"][32 << 20]
    alone_us = (32 << 20) * 8e6 / pool.wire_bps + pool.latency_ps / 1e6
    assert found["CXL pool"][32 << 20] == pytest.approx(alone_us, rel=0.01)


def test_splitting_long_sequences_balances_and_sends_less_than_splitting_all() -> None:
    """A placement that loses work, or sends what it need not."""
    program = example("variable_length_data_parallelism")
    ranks, lengths = 8, program.draw(32)
    found = program.measure(ranks, 32)
    fair_us = 1e6 * sum(map(program.work_s, lengths)) / ranks

    assert found["split_all"][0] == pytest.approx(fair_us)
    assert fair_us <= found["split_long"][0] <= found["whole"][0]
    assert 0 == found["whole"][2] <= found["split_long"][2] <= found["split_all"][2]
    for way in (program.whole, program.split_all, program.split_long):
        assert sorted(lengths) == sorted(tokens for tokens, _ in way(lengths, ranks))


def test_a_live_migration_halts_for_its_last_round_only() -> None:
    """Pages that were changed after they were sent, and are not sent again."""
    program = example("kv_and_module_migration")
    found = program.measure(requests=16, layers=2)
    pages = 16 * 2 * 8192 // program.TOKENS_PAGE

    assert pages == found["stop"][2]
    for way in ("kv live", "weights there"):
        total_s, halt_s, sent, rounds = found[way]
        assert halt_s < total_s / 10
        assert sent > pages
        assert rounds >= 2
    assert found["weights there"][0] < found["stop"][0]


def test_tiles_save_launches_and_turns() -> None:
    """A tax that is made of other things than those it names."""
    program = example("multi_gpu_tax")
    found = program.measure(ranks=4, tiles=8)

    assert found["tiles"] < found["bulk"]
    assert found["of it launches"] == pytest.approx(2 * program.LAUNCH_S * 1e6, rel=0.2)
    assert found["of it taking turns"] > 0
