"""tep on Ray, with a look-alike of Ray that is held to its recorded interface."""

from __future__ import annotations

import json
import random
import sys

import pytest

from tep.base.errors import BackendUnavailable, RendezvousError, UsageError, WaitTimeout
from tep.cli import main
from tep.integrations.ray import cluster as on_ray
from tep.integrations.ray.cluster import calls, run_ranks
from tep.rendezvous.launch import place_here
from tep.sim import sweep
from tep.testing.spreading import ProtocolJudge, search
from tests.support.fake_ray import FakeRay


@pytest.fixture
def ray(monkeypatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


class Odd:
    """A judge: every seventh seed is wrong."""

    def __call__(self, seed, row_log=None):
        return "odd" if seed % 7 == 3 else None


@pytest.mark.parametrize("n", [0, 1, 40, 3000])
@pytest.mark.parametrize("most", [1, 3, 999])
def test_a_cluster_finds_what_one_loop_finds(ray, n, most) -> None:
    """A share that ends first must not hide a lower seed of a share that still runs."""
    wait, dice, moved = ray.wait, random.Random(n), []

    def mixed(refs, **more):
        return wait(dice.sample(refs, len(refs)), **more)

    ray.wait = mixed
    seeds = range(5, 5 + n)
    found, _ = search(Odd(), seeds, calls=calls("here:1"), most=most, judged=moved.append)
    alone, _ = search(Odd(), seeds, most=most)

    assert list(alone) == list(found)
    assert sum(moved) == n if most == 999 else sum(moved) <= n
    assert not ray.refs
    assert not ray.joined
    assert "here:1" == ray.asked["address"]


def test_a_seed_without_a_finding_is_judged_once(ray) -> None:
    """Twice the work; and a share that takes long would pass for a worker that does not answer."""
    judged, shares = [], []

    class Counted(Odd):
        def __call__(self, seed, row_log=None):
            judged.append(seed)
            return super().__call__(seed)

        def __reduce__(self):
            return lambda: self, ()

    ray.put = lambda one: one
    search(Counted(), range(3000), calls=calls(), most=999, judged=shares.append)

    found = range(3, 3000, 7)
    assert sorted([*range(3000), *found]) == sorted(judged)
    assert 16 == max(shares)


def test_workers_that_are_lost_again_and_again_end_a_search(ray) -> None:
    """A seed that kills its workers is among those that are named: they can be run alone."""
    ray.script.extend([None, ray.exceptions.WorkerCrashedError("killed")])
    with pytest.raises(RendezvousError, match=r"5 workers .* range\(1, 2\), the last .*: killed"):
        search(Odd(), range(9), calls=calls())
    assert not ray.refs


@pytest.mark.slow
def test_nobody_answers(ray) -> None:
    """A cluster without workers must end a search, not hang it."""
    ray.wait = lambda refs, **_: ([], refs)
    with pytest.raises(WaitTimeout, match=r"2 calls are open, the first is range\(0, 1\)"):
        search(Odd(), range(18), calls=calls(timeout_s=0.5))
    assert not ray.refs


@pytest.mark.parametrize("address", ["local", "here:1"])
def test_a_cluster_of_this_process_has_no_dashboard(ray, address) -> None:
    """It takes a port, and seconds of each start; a cluster that is there already has its own."""
    on_ray.connect(address)

    assert ({"include_dashboard": False} if address == "local" else {}) == {
        key: value for key, value in ray.asked.items() if key == "include_dashboard"
    }


def test_other_errors_end_a_search(ray, monkeypatch) -> None:
    """Workers that lack tep, or have another, must not pass for workers that found nothing."""
    ray.script.append(ray.exceptions.RayTaskError("no module named tep"))
    with pytest.raises(UsageError, match=r"fails at range\(0, 1\): no module named tep"):
        search(Odd(), range(9), calls=calls())
    ray.script.append(ray.exceptions.RuntimeEnvSetupError("no folder"))
    with pytest.raises(UsageError, match="cannot start workers: no folder"):
        search(Odd(), range(9), calls=calls())
    codes = iter(["theirs", "ours"])
    monkeypatch.setattr(on_ray, "_code", lambda: next(codes))
    with pytest.raises(UsageError, match=r"a worker has another tep, at .*tep/__init__.py"):
        search(Odd(), range(9), calls=calls())


def test_a_sweep_on_a_cluster_has_the_rows_of_one_here(ray, tmp_path) -> None:
    """Where a call is made changes nothing but the time; what was made is kept by its file."""
    grid, path = {"x": [1, 2, 3]}, tmp_path / "runs.jsonl"
    found = sweep(cube, grid, seeds=2, calls=calls("here:1"), path=path, done=nothing)

    assert found == sweep(cube, grid, seeds=2, processes=1, done=nothing)
    assert ("here:1", False, {}) == (ray.asked["address"], ray.joined, ray.refs)
    ray.script.append(ray.exceptions.WorkerCrashedError("killed"))
    assert found == sweep(cube, grid, seeds=2, calls=calls(), path=path, done=nothing)
    with pytest.raises(RendezvousError, match=r"5 workers were lost at .*'x': 4.*killed"):
        sweep(cube, {"x": [4]}, calls=calls(), path=path, done=nothing)


def cube(x, seed):
    return float(x**3 + seed)


def nothing(*_):
    """A sweep without a bar."""


def test_a_cluster_that_is_not_there(ray, monkeypatch) -> None:
    """The message says what to start, and which extra to install."""
    with pytest.raises(UsageError, match=r"'nowhere:1': nobody is there. Start one with `ray sta"):
        search(Odd(), range(9), calls=calls("nowhere:1"))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'tep-engine\[ray\]'"):
        search(Odd(), range(9), calls=calls())


def test_a_protocols_folder_travels(ray, tmp_path, monkeypatch) -> None:
    """Ray sends it when a cluster is joined, and not later: then it would silently stay away."""
    tmp_path.joinpath("p.py").write_text("async def p(cluster):\n    pass\n", encoding="utf-8")
    judge = ProtocolJudge(f"{tmp_path}/p.py:p")
    monkeypatch.chdir(tmp_path)  # as Ray's workers are in a copy of it
    search(judge, range(2), calls=calls(folder=judge.folder))
    assert str(tmp_path) == ray.asked["runtime_env"]["working_dir"]
    ray.init("here:1")
    with pytest.raises(UsageError, match="in a Ray cluster already"):
        search(judge, range(2), calls=calls(folder=judge.folder))


@pytest.mark.slow
def test_the_command_prints_the_same_with_ray_and_without(ray, tmp_path, capsys, monkeypatch):
    """A search on a cluster must give the findings of one machine, in the same order."""
    source = (
        "import tep\n\nasync def wrong(cluster):\n"
        "    assert len(cluster.engines[0].main_address.domains) < 4, 'four'\n"
    )
    tmp_path.joinpath("my_protocol.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    hunt = ["sim", "--protocol", "my_protocol.py:wrong", "--runs", "60", "--findings", "3"]
    for command in ([*hunt, "--json"], [*hunt[:3], "--runs", "2", "--nics", "1", "--json"], hunt):
        statuses = [main(command)]
        alone = capsys.readouterr().out
        for more in (["--ray"], ["--ray", "h:1"]):
            statuses.append(main([*command[:1], *more, *command[1:]]))
            seen = capsys.readouterr()
            assert alone == seen.out
            assert [*more, "auto"][1] == ray.asked["address"]
        assert {0 if "--nics" in command else 1} == set(statuses)
        if "--findings" in command and "--json" in command:
            assert 3 == len({one["seed"] for one in json.loads(alone)["findings"]})


def tell(arguments: list[str]) -> int:
    """A program of ranks."""
    place = place_here()
    sys.stdout.write(f"{place.rank} of {place.size} {' '.join(arguments)}")
    return 3 if str(place.rank) in arguments else 0


def test_ranks_find_what_torchrun_sets(ray, monkeypatch) -> None:
    """A program for torchrun and srun must start as Ray's actors; a failed rank is named."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TEP_TOKEN"):
        monkeypatch.setenv(name, "")
    program = f"{__name__}:tell"
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or on_ray)
    monkeypatch.setattr(sys.modules[__name__], "tell", tell, raising=False)

    assert (0, "0 of 3 a b") == run_ranks(program, ["a", "b"], 3, "h:1")
    assert (3, "0 of 2 0") == run_ranks(program, ["0"], 2)
    with pytest.raises(RendezvousError, match="rank 1 ended with 3"):
        run_ranks(program, ["1"], 3)
    ray.script.extend([None, None, ray.exceptions.NodeDiedError("gone")])
    with pytest.raises(RendezvousError, match="rank 1 was lost: NodeDiedError: gone"):
        run_ranks(program, [], 2)
    with pytest.raises(UsageError, match="size=0"):
        run_ranks(program, [], 0)
    assert 3 + 2 + 3 + 2 == len(ray.killed)
    assert not ray.joined
