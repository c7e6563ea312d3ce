"""A pytest plugin: hostile clusters as a fixture, for tests of protocols on top of tep.

Installed with the package; loads nothing of tep until a test asks for it.

    def test_my_protocol(tep_cluster):                  # two nodes, drawn NICs and faults
        tep_cluster.run(my_protocol(tep_cluster))

    @pytest.mark.tep(nodes=3, nics=(1, 4), faults="order nics", runs=50)
    def test_another(tep_cluster): ...

    def test_my_connector(tep_nixl): ...                # agents of NIXL's interface on one

Each test that asks for `tep_cluster` runs once a seed, and is judged as `tep.testing.run` judges:
it may end in an error that a fault has caused, unless its mark says may_fail=False; it must end
after healing; and afterwards the cluster comes to rest, and everything posted must have ended.
A failure prints the command that runs it again.

    --tep-seed N      the first seed (0)
    --tep-runs N      seeds a test (20, or what its mark says)
    --tep-faults G    groups of faults for all tests: all, none, or order,nics,links,...
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from tep.testing.case import Case
    from tep.testing.hunting import Trial

__all__ = [
    "pytest_addoption", "pytest_configure", "pytest_generate_tests", "pytest_pyfunc_call",
    "pytest_runtest_makereport", "tep_case", "tep_cluster", "tep_nixl",
]  # fmt: skip

_RUNS: Final = 20
_MARK: Final = (
    "tep(nodes=2, nics=(1, 4), faults='all', heal_us=40.0, runs=20, may_fail=True): "
    "the shape of the clusters that tep_cluster draws for this test"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("tep", "hostile clusters for protocols on top of tep")
    group.addoption(
        "--tep-seed", type=int, default=0, metavar="N", help="first seed of each tep_cluster test"
    )
    group.addoption(
        "--tep-runs", type=int, default=None, metavar="N", help=f"seeds a test; {_RUNS} if not said"
    )
    group.addoption(
        "--tep-faults",
        default=None,
        metavar="GROUPS",
        help="what goes wrong: all, none, or groups like order,nics,links",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line("markers", _MARK)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once a seed."""
    if "tep_case" not in metafunc.fixturenames:
        return
    config = metafunc.config
    shape = _shape(metafunc.definition, config)
    runs = config.getoption("--tep-runs")
    runs = shape.pop("runs", _RUNS) if runs is None else runs
    first = config.getoption("--tep-seed")
    ids = [f"seed{seed}" for seed in range(first, first + runs)]
    params = [(seed, shape) for seed in range(first, first + runs)]
    metafunc.parametrize("tep_case", params, indirect=True, ids=ids)


def _shape(node: pytest.Item | Any, config: pytest.Config) -> dict[str, Any]:
    mark = node.get_closest_marker("tep")
    shape = {} if mark is None else dict(mark.kwargs)
    faults = config.getoption("--tep-faults")
    if faults is not None:
        shape["faults"] = faults
    return shape


@pytest.fixture
def tep_case(request: pytest.FixtureRequest) -> Case:
    """The case of this run: node names, NICs, faults."""
    return _case(*request.param)


def _case(seed: int, shape: dict[str, Any]) -> Case:
    from tep.testing.case import Case

    ours = ("runs", "may_fail")
    return Case.draw(seed, **{name: value for name, value in shape.items() if name not in ours})


@pytest.fixture
def tep_cluster(request: pytest.FixtureRequest, tep_case: Case) -> Iterator[Trial]:
    """A cluster in which things go wrong, drawn from this run's seed.

    Trouble ends at the case's `heal_us`. After the test the cluster comes to rest, and a transfer
    that has not ended then is an error of the test.
    """
    from tep.testing.hunting import Trial, verify

    _, shape = request.node.callspec.params["tep_case"]
    with Trial(tep_case, may_fail=shape.get("may_fail", True)) as trial:
        yield trial
        verify(trial)


@pytest.fixture
def tep_nixl(tep_case: Case, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    """A cluster under NIXL's interface: the n-th agent that is opened is its n-th node."""
    from tep.compat.nixl.chaos import using
    from tep.testing.hunting import Trial

    monkeypatch.setenv("TEP_NIXL_BACKEND", "chaos")
    with Trial(tep_case) as trial, using(trial):
        yield trial


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Let a test pass that ends in an error which a fault of its cluster has caused."""
    __tracebackhide__ = True
    try:
        return (yield)
    except Exception as error:
        from tep.base.errors import TepError

        trial = getattr(pyfuncitem, "funcargs", {}).get("tep_cluster")
        if trial is not None and isinstance(error, TepError | ExceptionGroup):
            trial.judge(error)
            return True
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say under a failure how to run it again."""
    report = yield
    params = getattr(getattr(item, "callspec", None), "params", {})
    if report.failed and "tep_case" in params:
        seed, shape = params["tep_case"]
        faults = shape.get("faults")
        option = item.config.getoption("--tep-faults")
        name = item.nodeid.partition("[")[0]
        line = f"pytest '{name}' --tep-seed {seed} --tep-runs 1"
        if option is not None:
            line += f" --tep-faults '{faults}'"
        report.sections.append(("tep: run it again", f"{line}\n{_case(seed, shape)!r}"))
    return report
