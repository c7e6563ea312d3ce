"""The base of Ray's transport: objects that one process offers and others pull."""

from __future__ import annotations

import ast
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import tep
from tep.integrations.ray import pulling
from tep.integrations.ray.pulling import Puller
from tep.sim import Chaos, Cluster, Faults, KillNic
from tep.testing import Case
from tests.support.fake_ray import RECORD
from tests.support.inside import machine_of

SIZES = (5000, 64, 1)


def offer(puller: Puller, name: str, arrays) -> list[bytes]:
    return puller.offer(name, [(one.ctypes.data, one.nbytes, one) for one in arrays])


def drawn(seed: int) -> list:
    dice = np.random.default_rng(seed)
    return [dice.integers(0, 256, n, dtype=np.uint8) for n in SIZES]


def pieces_of(descs, target) -> list:
    return list(zip(descs, np.split(target, np.cumsum(SIZES)[:-1]), strict=True))


def test_a_read_that_is_refused_leaves_nothing_registered(monkeypatch) -> None:
    """Its memory would stay with the engine, and the pull among those that an abort waits for."""
    with tep.TransferEngine.open("loopback") as ours, tep.TransferEngine.open("loopback") as theirs:
        owner, reader = Puller(ours), Puller(theirs)
        pieces = pieces_of(offer(owner, "x", drawn(1)), np.zeros(sum(SIZES), np.uint8))
        submit, left = theirs.submit_single_read, [1]

        def refused(*args, **more):
            if not left:
                raise tep.BusyError("too many rows wait")
            left.pop()
            return submit(*args, **more)

        monkeypatch.setattr(theirs, "submit_single_read", refused)
        with pytest.raises(tep.BusyError):
            reader.pull("x", pieces)
        end_s = time.monotonic() + 20
        while reader._pulls or theirs.stats().regions:
            assert time.monotonic() < end_s, (reader._pulls, theirs.stats().regions)


def test_an_abort_reaches_the_read_that_is_just_submitted(monkeypatch) -> None:
    """It went on into memory that Ray had given to somebody else."""
    with tep.TransferEngine.open("loopback") as ours, tep.TransferEngine.open("loopback") as theirs:
        owner, reader = Puller(ours), Puller(theirs)
        pieces = pieces_of(offer(owner, "x", drawn(1)), np.zeros(sum(SIZES), np.uint8))
        made = []

        def aborted(*_, on_done):
            made.append(Mock())
            reader.abort("x")
            on_done(None)
            return made[-1]

        monkeypatch.setattr(theirs, "submit_single_read", aborted)
        reader.pull("x", pieces)
        assert len(SIZES) == len(made)
        assert all(read.cancel.called for read in made)


@pytest.mark.parametrize("backend", ["loopback", "local"])
def test_objects_are_pulled_whole_and_given_back(backend) -> None:
    """Memory that stays registered is memory that a training job cannot use again."""
    with tep.TransferEngine.open(backend) as ours, tep.TransferEngine.open(backend) as theirs:
        owner, reader = Puller(ours), Puller(theirs)
        one, two = drawn(1), drawn(2)
        shared = [*one[:1], *two[1:]]
        descs = offer(owner, "one", one)
        assert descs == offer(owner, "one", one), "a task that Ray does again describes it anew"
        assert descs[0] == offer(owner, "shared", shared)[0], "registered twice"
        assert [b""] == offer(owner, "nothing", [np.empty(0, np.uint8)])

        target = np.zeros(sum(SIZES), np.uint8)
        reader.pull("one", pieces_of(descs, target)).wait(30)
        assert np.concatenate(one).tobytes() == target.tobytes()
        owner.withdraw("one")
        owner.withdraw("one")
        again = np.zeros(SIZES[0], np.uint8)
        reader.pull("shared", [(descs[0], again)]).wait(30)
        assert one[0].tobytes() == again.tobytes(), "another object was withdrawn with it"
        owner.withdraw("shared")
        late = reader.pull("one", [(descs[0], again)])
        with pytest.raises(tep.FabricError):
            late.wait(30)
        owner.withdraw("nothing")
        assert {} == machine_of(ours).regions
        with pytest.raises(tep.BadDescriptor):
            reader.pull("odd", [(b"odd", again)])
        with pytest.raises(tep.BadRequest):
            reader.pull("odd", [(descs[0], b"a bytes object is no target")])
        while machine_of(theirs).regions:
            theirs.driver.call(lambda: None)  # a callback of the worker gives them back
        assert [] == list(theirs.callback_errors)


def test_a_pull_can_end_while_memory_is_registered(monkeypatch) -> None:
    """The worker ends pulls, and registers: under one lock each would wait for the other."""
    with tep.TransferEngine.open("loopback") as engine:
        puller, ended = Puller(engine), []

        def another_ends() -> None:
            thread = threading.Thread(target=puller.over, args=("another", None), daemon=True)
            thread.start()
            thread.join(30)
            ended.append(not thread.is_alive())

        for name in ("reg_mr", "deregister"):
            real = getattr(engine, name)

            def call(*words, _real=real, **named):
                another_ends()
                return _real(*words, **named)

            monkeypatch.setattr(engine, name, call)
        memory = drawn(1)
        descs = offer(puller, "one", memory)
        target = np.zeros(sum(SIZES), np.uint8)
        puller.pull("one", pieces_of(descs, target)).wait(30)
        puller.withdraw("one")

        assert [True] * 4 * len(SIZES) == ended


def test_aborted_pulls_end(monkeypatch) -> None:
    """Ray kills both actors of a transport that cannot abort; and an aborted one must not land."""
    monkeypatch.setattr(pulling, "_LOOK_S", 1e-6)
    assert {"came", "aborted"} == {abort_one(seed) for seed in range(30)}


def abort_one(seed: int) -> str:
    with Cluster(nodes=2, nics=2, seed=seed) as cluster:
        owner, reader = map(Puller, cluster.engines)
        arrays, target = drawn(seed), np.zeros(sum(SIZES), np.uint8)
        pull = reader.pull("o", pieces_of(offer(owner, "o", arrays), target))
        cluster.env.run_until(iter([False] * (2 * seed) + [True]).__next__)
        reader.abort("o")
        try:
            pull.wait(1)
            ended = "came"
            assert np.concatenate(arrays).tobytes() == target.tobytes()
        except tep.Cancelled:
            ended, before = "aborted", target.tobytes()
            cluster.env.run_until(lambda: False)
            assert before == target.tobytes()
        assert {} == machine_of(cluster.engines[1]).regions
        owner.withdraw("o")

        reader.abort("o")  # over: the next pull is another one
        reader.abort("p")  # not begun: it will not
        with pytest.raises(tep.Cancelled, match="aborted before it began"):
            reader.pull("p", [])
        reader.pull("o", pieces_of(offer(owner, "o", arrays), target)).wait(1)
        assert np.concatenate(arrays).tobytes() == target.tobytes()
    return ended


def test_an_owner_that_is_lost() -> None:
    """A pull from a dead process must end with an error, and let go of its memory."""
    case = Case(nics=(1, 1), faults=Faults(((1, KillNic("a", 0)),), Chaos.calm()))
    with Cluster(nodes=2, nics=case.nics, faults=case.faults) as cluster:
        owner, reader = map(Puller, cluster.engines)
        target = np.zeros(sum(SIZES), np.uint8)
        pull = reader.pull("o", pieces_of(offer(owner, "o", drawn(1)), target))
        with pytest.raises(tep.FabricError):
            pull.wait(1)
        assert {} == machine_of(cluster.engines[1]).regions


def test_the_transport_has_rays_methods() -> None:
    """Ray calls them by name and by place; a renamed argument shows only when tensors move."""
    module = Path(pulling.__file__).with_name("transport.py").read_text(encoding="utf-8")
    classes = {one.name: one for one in ast.parse(module).body if isinstance(one, ast.ClassDef)}
    ours = {
        one.name: [arg.arg for arg in one.args.args]
        for one in classes["TepTransport"].body
        if isinstance(one, ast.FunctionDef)
    }
    for name, parameters in RECORD["transport"].items():
        if not name.startswith("_"):
            assert parameters == ours[name], name
    assert set(RECORD["transport must have"]) <= set(ours)
    fields = RECORD["transport fields"]
    assert {"tensor_meta", "tensor_device"} == set(fields["TensorTransportMetadata"])
    assert {"obj_id", "tensors"} == set(fields["FetchRequest"])
    assert 4 == len(RECORD["register_tensor_transport"])
