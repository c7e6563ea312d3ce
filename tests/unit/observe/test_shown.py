"""Results that one can look at: the table, the frame, the picture."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import tep
from tep.apps import rl
from tep.apps.kvcache.simulate import Load, Plant, simulate
from tep.apps.rl import study
from tep.apps.rl.predict import Prediction
from tep.base.errors import UsageError
from tep.observe.shown import Shown, draw
from tep.sim.fit import Measured, fit
from tep.sim.sweeps import Table
from tep.testing import hunt
from tests.support.pairs import pair

ROWS = (
    {"machine": "efa", "page, B": 4096, "time, ms": 2.5, "time, ms low": 2.0, "time, ms high": 3.0},
    {"machine": "efa", "page, B": 8192, "time, ms": 1.5, "time, ms low": 1.0, "time, ms high": 2.0},
    {"machine": "cx7", "page, B": 4096, "time, ms": 1.0, "time, ms low": 0.5, "time, ms high": 2.0},
    {"machine": "cx7", "page, B": 8192, "time, ms": 0.5, "time, ms low": 0.5, "time, ms high": 1.0},
)


def test_a_notebook_shows_a_table() -> None:
    """A tuple of dictionaries in one line is read by nobody; a name may hold any character."""
    shown = Table(({"a < b": "x & y", "time, ms": 1234.5678},))._repr_html_()

    assert "<th>a &lt; b</th>" in shown
    assert "<td>x &amp; y</td>" in shown
    assert "<td>1,235</td>" in shown


def test_a_long_table_says_how_much_it_leaves_out() -> None:
    """A notebook of a hundred thousand rows does not open any more."""
    shown = Table(tuple({"n": k} for k in range(250)))._repr_html_()

    assert 201 == shown.count("<tr>")
    assert "and 50 rows more" in shown
    assert "<table>" in Table(())._repr_html_()


def test_a_repr_is_one_line() -> None:
    """A shell shows the repr of whatever a call returns."""
    assert "Table(4 rows: machine; page, B; time, ms; " in repr(Table(ROWS))
    assert "\n" not in repr(Table(ROWS))
    assert repr(Table(ROWS, 3)).endswith("3 runs are missing: interrupted)")


def test_pandas_gets_all_rows(monkeypatch) -> None:
    """Whoever has pandas goes on there."""
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))

    assert list(ROWS) == Table(ROWS).to_pandas()


def test_numbers_are_lines_with_their_interval() -> None:
    """A picture without units, or without a name for each line, has to be asked about."""
    pytest.importorskip("matplotlib")
    axes = Table(ROWS).plot()

    assert ("page, B", "time, ms") == (axes.get_xlabel(), axes.get_ylabel())
    assert ["efa", "cx7"] == [text.get_text() for text in axes.get_legend().get_texts()]
    assert [[2.5, 1.5], [1.0, 0.5]] == [list(line.get_ydata()) for line in axes.get_lines()]
    assert 2 == len(axes.collections), "a band for each line"
    assert "linear" == axes.get_xscale()


def test_words_are_bars_and_far_values_stand_on_a_logarithmic_axis() -> None:
    """Bars of several lines must not hide each other."""
    pytest.importorskip("matplotlib")
    axes = draw(ROWS, x="machine", y="time, ms")
    far = draw([{"x": 1, "y": 1.0}, {"x": 1024, "y": 2.0}])

    assert ["efa", "cx7"] == [label.get_text() for label in axes.get_xticklabels()]
    assert 4 == len(axes.patches) == len({bar.get_x() for bar in axes.patches})
    assert "log" == far.get_xscale()


def test_a_column_that_is_not_there_is_named() -> None:
    """A typing mistake must not end in a KeyError of matplotlib's."""
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="no column 'nics'; there are: machine, page, B"):
        draw(ROWS, x="nics")
    with pytest.raises(UsageError, match="no row"):
        draw([])


def test_a_dataclass_shows_its_fields() -> None:
    """Statistics of an engine are thirty numbers in one line."""

    @dataclass(frozen=True, slots=True)
    class Two(Shown):
        rows: int
        name: str

    assert [{"what": "rows", "value": 1}, {"what": "name", "value": "x"}] == Two(1, "x").table()
    with pair() as p:
        assert "<td>imms_counted</td>" in p.a.stats()._repr_html_()


def results() -> dict[str, Shown]:
    """One of each kind of result that a user gets back."""
    profile = tep.sim.load_profile("cx7_400")
    points = [Measured("single", 65536, 40.0), Measured("paged", 65536, 300.0)]
    deployment = study.Deployment(
        model=rl.load_model("qwen3-235b"),
        train=study.train_layout(32),
        infer=study.infer_layout(16),
    )
    load = Load(rate=1, duration_s=2, ntokens=(1024,), max_tokens=2, seed=2)
    with tep.sim.Cluster(2, nics=2) as cluster:
        a, b = cluster.engines
        (mr, _), (_, desc) = a.reg_mr(bytearray(4096)), b.reg_mr(bytearray(4096))
        sent = a.submit_single_write(4096, (mr, 0), (desc, 0))
        sent.wait()
        stats = sent.stats(), a.stats()
    return {
        "transfer": stats[0],
        "engine": stats[1],
        "fit": fit(points, profile),
        "hunt": hunt(_nothing, runs=2, faults="none"),
        "schedule": deployment.schedule(),
        "update": Prediction(
            total_ms=3.0, stages={"load": 1.0}, wait_ms=2.0, links=(), peak_bytes=0, spans=()
        ),
        "requests": simulate(Plant(prefillers=1, decoders=1, profile="efa_2x200"), load),
        "question": tep.sim.transfer_time([65536, 1 << 20], "cx7_400"),
    }


async def _nothing(cluster: tep.sim.Cluster) -> None:
    pass


@pytest.mark.slow
def test_every_result_can_be_looked_at() -> None:
    """A schedule's repr had two megabytes, and pictures of statistics ended in a TypeError."""
    for name, result in results().items():
        assert "\n" not in repr(result), name
        assert 700 > len(repr(result)), name
        assert result._repr_html_().startswith("<table><tr><th>"), name
        assert result.plot().get_ylabel(), name


def test_a_trace_is_a_table_and_a_timeline() -> None:
    """What a simulation did is looked at where it ran."""
    with tep.sim.Cluster(2, profile="efa_2x200") as cluster, cluster.trace() as trace:
        a, b = cluster.engines
        (mr, _), (_, desc) = a.reg_mr(bytearray(4096)), b.reg_mr(bytearray(4096))
        got = b.expect_imm_count(1, 1)
        a.submit_single_write(4096, (mr, 0), (desc, 0), 1).wait()
        got.wait()

    assert 4096 in {row["bytes"] for row in trace.table()}
    assert all(row["busy, us"] > 0 for row in trace.table())
    assert "us of simulated time" == trace.plot().get_xlabel()
    trace.spans[0] = trace.spans[0]._replace(stop_s=1.0)
    assert "ms of simulated time" == trace.plot().get_xlabel(), "nobody reads 800000 us"


def test_a_terminal_gets_columns() -> None:
    """Not everybody works in a notebook."""
    assert "n   time, ms\n1   0.5\n10  1,234" == str(
        Table(({"n": 1, "time, ms": 0.5}, {"n": 10, "time, ms": 1234.0}))
    )
    assert "" == str(Table(()))
