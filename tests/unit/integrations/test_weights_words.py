"""Words between the processes of a weight update: errors travel, and none is lost in silence."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

import tep
from tep.apps.rl import RemoteRollout, RemoteTraining, whole
from tep.apps.rl.metadata import RolloutMeta, TrainMeta
from tep.integrations.weights.member import Fabric, Member
from tep.integrations.weights.ranks import Want
from tep.rendezvous import calls
from tep.rendezvous.calls import Caller, Hello, Listener, answer

TIMEOUT_S = 120.0
SOON_S = 40.0  # much less than anybody waits


def raises(param):
    raise KeyError(f"no {param.name} here")


MISTAKES = {
    "KeyError: 'no w here'": raises,
    "float31": lambda param: Want("float31", whole(param.shape)),
    "bfloat16": lambda param: Want("bfloat16", whole(param.shape)),
    "wanted is fp32 of": lambda param: Want("fp32", ((0, 9), (0, 9))),
    r"is no Want, or raised": lambda param: "fp32",
    "is no Want, or raised: TypeError": lambda param: 5,
    "None for all 2 parameters": lambda param: None,
}


class Trio:
    """Two training ranks and a rollout rank, each with a thread."""

    def __init__(self, wants=None):
        fabric = Fabric(timeout_s=TIMEOUT_S)
        self.members = [Member(name, fabric) for name in ("words-0", "words-1", "words-r")]
        self.zero, self.one, self.rollout = self.members
        meeting = self.zero.lead(2)
        self.one.follow(meeting, 1, 2)
        self.rollout.receive_from(meeting, *([wants] if wants else []))

    def send(self, version):
        """Send on both ranks; return what each of them said, "" if nothing."""
        weights = [("w", np.full((4, 4), version, np.float32)), ("b", np.ones(4, np.float32))]
        said = ["", ""]

        def send(rank):
            try:
                self.members[rank].send(weights, version)
            except tep.TepError as error:
                said[rank] = str(error)

        other = threading.Thread(target=send, args=(1,))
        other.start()
        send(0)
        other.join()
        return said

    def close(self):
        for member in reversed(self.members):
            member.close()


@pytest.fixture
def trio():
    made = []

    def make(wants=None):
        made.append(Trio(wants))
        return made[0]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_wants_is_everybodys_error_at_once(trio, text):
    """They waited for the whole time-out, and then said "TimeoutError: "."""
    wrong = [True]

    def wants(param):
        return MISTAKES[text](param) if wrong[0] else Want("fp32", whole(param.shape))

    made, begin_s = trio(wants), time.monotonic()
    said = made.send(1)
    with pytest.raises(tep.FabricError, match=text):
        made.rollout.whole(1, TIMEOUT_S)
    assert time.monotonic() - begin_s < SOON_S
    for one in said:
        assert text.replace("\\", "") in one or "wants" in one, said
    wrong[0] = False

    assert ["", ""] == made.send(2)
    assert 2 == made.rollout.whole(2, TIMEOUT_S)


CALLS = ["held", "set_routing", "connect", "transfer_weights", "describe", "begin", "finished",
         "WeightReceiver.ended", "WeightSender.ended"]  # fmt: skip


@pytest.mark.parametrize("when", ["question", "answer"])
@pytest.mark.parametrize("call", CALLS)
def test_a_connection_that_breaks_is_everybodys_error(trio, monkeypatch, call, when):
    """A word that was lost was waited for by all the others, each for its whole time-out."""
    made, serve, done = trio(), Caller._serve, []

    async def broken(self, question):
        name = f"{type(self.worker).__name__}.{question.method}"
        if not name.endswith(call) or done:
            return await serve(self, question)
        done.append(type(self.worker).__name__)
        if when == "answer":
            method = getattr(self.worker, question.method)
            await method(*calls._typed(method, question.args))
        self._peer.abort()
        return None

    monkeypatch.setattr(Caller, "_serve", broken)
    begin_s = time.monotonic()
    said = made.send(1)
    (who,) = done
    if who == "WeightReceiver":
        with pytest.raises(tep.FabricError):
            made.rollout.whole(2, TIMEOUT_S)
    assert time.monotonic() - begin_s < SOON_S

    if call != "WeightSender.ended":  # its sender knows that it is sent
        assert all(said), said
        assert "hung up" in said[0] or "hung up" in said[1]


def test_what_any_worker_raises_is_the_answer():
    """An exception that is none of tep's ended the answer and not the question."""

    class Odd:
        async def fails(self) -> int:
            raise ZeroDivisionError("in the user's function")

        async def long(self) -> int:
            raise tep.TepError("\ud800" * 100_000)

        async def strange(self) -> object:
            return object()

        async def other(self) -> str:
            return "no number"

        async def takes(self, number: int) -> int:
            return number

    async def main() -> list[str]:
        found = []
        async with Listener("a token") as listener:
            hello = Hello("odd", "w")
            task = asyncio.ensure_future(
                answer(Odd(), "127.0.0.1", listener.port, "a token", hello)
            )
            caller = await listener.wait_for("odd", "w", 60.0)
            for name, *args in (
                ("fails",), ("long",), ("strange",), ("other",), ("takes", "x"), ("takes", 1, 2),
                ("takes",), ("__init__",), ("none",),
            ):  # fmt: skip
                with pytest.raises(tep.FabricError) as error:
                    await asyncio.wait_for(caller.call(int, name, *args), 60.0)
                found.append(str(error.value))
            assert 5 == await caller.call(int, "takes", 5)
            await caller.close()
            await task
        return found

    said = asyncio.run(main())
    assert "ZeroDivisionError: in the user's function" in said[0]
    assert max(map(len, said)) < 3000
    assert "no number" not in said[3]
    assert "answered other with something else" in said[3]


@pytest.mark.parametrize("kind", [RemoteRollout, RemoteTraining])
def test_a_connection_speaks_for_the_worker_that_it_began_as(kind):
    """A worker that says another's name later took its place in the update."""

    class Liar:
        async def param_meta(self) -> object:
            if kind is RemoteTraining:
                return TrainMeta(1, 1, (), {}, ())
            return RolloutMeta("r1", 1, (), 0)

    async def main() -> None:
        async with Listener("a token") as listener:
            hello = Hello("role", "0")
            task = asyncio.ensure_future(
                answer(Liar(), "127.0.0.1", listener.port, "a token", hello)
            )
            caller = await listener.wait_for("role", "0", 60.0)
            try:
                await kind(caller).param_meta()
            finally:
                await caller.close()
                await task

    with pytest.raises(tep.FabricError, match="says that it is"):
        asyncio.run(main())
