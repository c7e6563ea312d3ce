"""notebooks/examples, in small: they run, and what they show follows from their numbers."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from dataclasses import replace
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

    assert 7 == len(programs)
    for path in programs:
        text = path.read_text("utf-8")
        assert text.count("\n") <= LINES_MAX, path.name
        assert f"| {path.stem} |" in page
        assert f"examples/{path.name}" in page
        assert "Measures: " in text
        assert re.search(r"Published\b.*arXiv\s+25\d\d\.\d+", text, re.DOTALL), path.name
        assert "Leaves out: " in text or "leaves out" in text.lower()


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("prefix_kv_many_tiers", ["--users", "2", "--rounds", "2"], "published, up to: 15"),
        ("compressed_prefix_kv", ["--requests", "1"], "published, up to"),
        ("collectives_1024_ranks", ["--ranks", "8", "--kib", "1"], "published: up to 12%"),
        ("cxl_shared_memory", ["--trips", "1"], "published: 7.2 to 8.1"),
        ("variable_length_data_parallelism", ["--sequences", "64"], "published: 2.80"),
        ("kv_and_module_migration", ["--phases", "1"], "published: 1.1 to 2.8"),
        ("multi_gpu_tax", ["--rows", "1024"], "published: up to 1.79"),
    ],
)
def test_each_prints_its_table(name, words, said, capsys) -> None:
    """A program that does not run any more."""
    assert 0 == example(name).main(words)
    assert said in capsys.readouterr().out


def test_tiers_answer_what_they_keep_and_a_cut_prompt_is_another() -> None:
    """Hits without a look-up; a tier that keeps more than it has room for."""
    program = example("prefix_kv_many_tiers")
    (alone, alone_ms, _), (memory, _, _), (every, every_ms, rate), (cut, _, _) = program.measure(
        3, 5
    ).values()

    assert 0 == alone < memory < every < 1
    assert cut < every
    assert every_ms < alone_ms
    assert 1 < rate * alone_ms / 1e3 <= 15
    small = program.tiers(2, 1)
    for chunk in range(100):
        program.put(small, chunk)
    assert [*range(100 - small[0].room, 100)] == list(small[0].chunks)


def test_decompression_on_the_gpu_costs_tokens_and_is_within_what_is_published() -> None:
    """A SmartNIC that disturbs the GPU; shares of a GPU that add up to more than one."""
    program = example("compressed_prefix_kv")
    found = program.measure(2)

    for gbps, ways in found.items():
        (token, first), (token_nic, first_nic) = ways["gpu"], ways["nic"]
        assert program.TOKEN_S <= token_nic < token <= 2.001 * program.TOKEN_S
        wire_s = program.TOKENS * program.KV_TOKEN_BYTES / program.RATIO * 8 / gbps / 1e9
        assert wire_s < first_nic <= 1.02 * first
        assert token / token_nic <= program.PUBLISHED["TPOT"]
        assert first / first_nic <= program.PUBLISHED["TTFT"]
    assert found[10]["gpu"][0] < found[40]["gpu"][0]


@pytest.mark.parametrize("way", ["direct", "doubling", "ring"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_each_all_gather_brings_all_bytes(way, ranks) -> None:
    """An algorithm that is fast because it leaves blocks out."""
    program = example("collectives_1024_ranks")
    took_us = program.gather(way, ranks, 1000, check=True)
    steps = {"direct": 1, "doubling": math.log2(ranks), "ring": ranks - 1}[way]

    assert took_us >= program.flow_us(way, ranks, 1000, 0)
    assert took_us >= steps * load_profile("cx7_400").latency_ps / 1e6


@pytest.mark.parametrize("way", ["direct", "doubling"])
def test_flows_on_a_clos_are_what_engines_take_where_the_uplink_decides(way) -> None:
    """Closed forms of 1,024 ranks that nothing smaller was held against."""
    program, times, nbytes = example("collectives_1024_ranks"), 8, 1 << 18
    plain = load_profile("cx7_400")
    uplink_bps = program.LEAF * plain.wire_bps // times
    clos = replace(plain, leaf_nodes=program.LEAF, uplink_bps=uplink_bps)
    took_us, flow_us = program.gather(way, 64, nbytes, profile=clos), program.flow_us

    assert took_us == pytest.approx(flow_us(way, 64, nbytes, times), rel=0.1)
    assert flow_us(way, 64, nbytes, times) > 2 * flow_us(way, 64, nbytes, 0)


def test_shared_memory_wins_where_latency_counts_and_pays_for_coherence() -> None:
    """A profile whose numbers do not reach the fabric; flushes that cost nothing."""
    program = example("cxl_shared_memory")
    found = program.measure(1)
    pool = program.MACHINES["CXL pool"]

    assert found["CXL pool"][8] < found["ConnectX-7"][8] < found["TCP"][8] < found["EFA, 2 NICs"][8]
    assert found["CXL pool"][32 << 20] > found["EFA, 2 NICs"][32 << 20]
    alone_us = (32 << 20) * 8e6 / pool.wire_bps + pool.latency_ps / 1e6
    assert found["CXL pool"][32 << 20] == pytest.approx(alone_us, rel=0.01)
    for nbytes, us in found["and coherent"].items():
        assert us == pytest.approx(found["CXL pool"][nbytes] + 1e6 * program.coherence_s(nbytes))
    assert found["TCP"][8] / found["and coherent"][8] == pytest.approx(7.65, rel=0.2)  # 7.2 to 8.1


def test_rings_by_length_are_faster_than_rings_for_all_and_nics_together_than_one() -> None:
    """A placement that loses work; a hop over eight NICs that takes as long as over one."""
    program = example("variable_length_data_parallelism")
    hosts, lengths = 2, program.draw(64)
    found = program.measure(hosts, 64)
    fair_ms = 1e3 * sum(map(program.work_s, lengths)) / hosts / program.GPUS

    assert fair_ms <= found["Zeppelin"] <= found["two levels"] < found["all"]
    assert found["Zeppelin"] <= found["routed"] < found["all"]
    assert program.hop_s(1 << 26, routed=True) < program.hop_s(1 << 26, routed=False) / 5
    for levels in (0, 1):
        placed = program.place(lengths, hosts, levels)
        assert sorted(lengths) == sorted(tokens for tokens, _ in placed)


def test_a_migration_is_made_where_it_pays_and_halts_for_its_last_round_only() -> None:
    """Moves between instances that are equally busy; pages that changed and are not sent again."""
    program = example("kv_and_module_migration")
    found = program.measure(3)

    for name, what, took_s, rate, static in found:
        assert ("nothing" == what) == (program.PHASES[name][0] == program.PHASES[name][1])
        assert rate >= static
        assert (took_s > 0) == (what != "nothing")
    assert "KV" in {what for _, what, *_ in found}
    took_s, halt_s = program.move_s(0, 16)
    assert 0 < halt_s < took_s / 10
    weights_s = 8 * program.WEIGHT_BYTES_LAYER * 8 / (2 * load_profile("efa_2x200").wire_bps)
    assert weights_s == pytest.approx(program.move_s(8, 0)[0], rel=0.05)
    assert 1.1 <= sum(r for *_, r, _ in found) / sum(s for *_, s in found) <= 2.8


def test_tiles_hide_what_is_sent_and_never_beat_the_slower_of_both() -> None:
    """A tax that is made of other things than those it names."""
    program = example("multi_gpu_tax")
    for bulk, tiles in program.measure(2048).values():
        assert tiles < bulk < 2 * tiles
    compute_us = 2e6 * 2048 * program.COLUMNS * program.INNER[-1] / program.FLOPS
    assert compute_us < program.run("tiles", 2048, program.INNER[-1])
