"""The door of the weights' hub and of RL's controller: strangers, tokens, a port that was taken."""

from __future__ import annotations

import asyncio
import logging

import pytest

import tep
from tep.base.errors import FabricError, UsageError
from tep.integrations.weights.member import Fabric, Meeting, Worker
from tep.rendezvous.calls import Hello, Listener, _Answer, answer
from tep.rendezvous.wire import Challenge, Join, Joined, Message, Peer, enter, frame, prove

TOKEN = "a secret of these tests"  # noqa: S105  # of these tests


class Service:
    """A worker that notes what it was told to load."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def ping(self) -> int:
        return 5

    async def load(self, path: str) -> None:
        self.loaded.append(path)

    async def zeros(self, nbytes: int) -> bytes:
        return bytes(nbytes)


def working(service: Service, port: int, token: str = TOKEN, name: str = "w") -> asyncio.Future:
    hello = Hello("sender", name)
    return asyncio.ensure_future(answer(service, "127.0.0.1", port, token, hello, patience_s=20.0))


def test_an_answer_that_no_frame_holds_is_the_error_of_its_call(monkeypatch) -> None:
    """The other end hangs up on a longer frame: all calls ended, and nobody knew why."""
    monkeypatch.setattr("tep.rendezvous.calls.FRAME_MAX", 1000)
    around = len(frame(_Answer(0, "", bytes(900)))) - 4 - 900

    async def main() -> int:
        async with Listener(TOKEN) as listener:
            work = working(Service(), listener.port)
            caller = await listener.wait_for("sender", "w", 20.0)
            most = await caller.call(bytes, "zeros", 1000 - around)
            with pytest.raises(FabricError, match="a control frame of 1001 bytes; 1000 at the"):
                await caller.call(bytes, "zeros", 1001 - around)
            with pytest.raises(UsageError, match="a control frame of .* bytes; 1000 at the most"):
                await caller.call(int, "load", "x" * 1000)
            assert 5 == await caller.call(int, "ping")
        await work
        return len(most) + around

    assert 1000 == asyncio.run(main())


def test_silent_strangers_are_few_and_keep_no_worker_out(monkeypatch, caplog) -> None:
    """400 silent connections took every descriptor of the hub, and asyncio wrote 15 MB about it."""
    monkeypatch.setattr("tep.rendezvous.wire.STRANGERS_MAX", 8)

    async def main() -> tuple[int, int]:
        async with Listener(TOKEN) as listener:
            crowd = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(50)]
            async with asyncio.timeout(20):
                for reader, _ in crowd[: 50 - 8]:
                    await reader.read()
            inside = sum(not reader.at_eof() for reader, _ in crowd)
            work = working(Service(), listener.port)
            caller = await listener.wait_for("sender", "w", 20.0)
            said = await caller.call(int, "ping")
            for _, writer in crowd:
                writer.close()
        await work
        return inside, said

    with caplog.at_level(logging.ERROR, "asyncio"):
        assert (8, 5) == asyncio.run(main())
    assert [] == caplog.messages


def test_a_silent_stranger_is_hung_up_on_in_time(monkeypatch) -> None:
    """Each held a descriptor of the hub for 10 s, and its log took a line for each."""
    monkeypatch.setattr("tep.rendezvous.wire.STRANGER_S", 0.05)

    async def main() -> bytes:
        async with Listener(TOKEN) as listener:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            told = await asyncio.wait_for(reader.read(), 20.0)
            writer.close()
        return told

    assert 4 < len(asyncio.run(main())), "the challenge, and then the end"


@pytest.mark.parametrize("args", [("/a", "/b"), (), (5,)])
def test_a_method_is_called_with_its_own_arguments_or_not_at_all(args) -> None:
    """Another release may pass one more: what it asks for must not be left out in silence."""
    service = Service()

    async def main() -> None:
        async with Listener(TOKEN) as listener:
            work = working(service, listener.port)
            caller = await listener.wait_for("sender", "w", 20.0)
            with pytest.raises(tep.FabricError, match="arg|Expected"):
                await caller.call(type(None), "load", *args)
            assert 5 == await caller.call(int, "ping")
        await work

    asyncio.run(main())
    assert [] == service.loaded


@pytest.mark.parametrize("token", [TOKEN[:-1], TOKEN + "?", ""])
def test_nobody_works_with_another_token(token) -> None:
    """A hub that compares only a part of the token would be anybody's."""

    async def main() -> object:
        async with Listener(TOKEN) as listener:
            work = working(Service(), listener.port, token)
            [error] = await asyncio.gather(work, return_exceptions=True)
            with pytest.raises(TimeoutError):
                await listener.wait_for("sender", "w", 0.0)
        return error

    error = asyncio.run(main())
    assert isinstance(error, tep.UsageError)
    assert "wrong token" in str(error)


@pytest.mark.parametrize("who", [("rank", 1, 2), ("worker", "sender"), ("worker", 1, "w"), ()])
def test_whoever_speaks_of_another_service_is_refused(who) -> None:
    """A rank of a rendezvous with the same token would be called as a worker."""

    async def main() -> None:
        async with Listener(TOKEN) as listener:
            with pytest.raises(tep.UsageError, match="is no worker"):
                await enter("127.0.0.1", listener.port, TOKEN, who, 20.0)

    asyncio.run(main())


@pytest.mark.parametrize("proof", [b"", bytes(32), prove(TOKEN, "joined", b"an older number")])
def test_whoever_took_the_port_is_not_obeyed_and_learns_no_token(proof) -> None:
    """The token went to it in clear text, and then it had a training rank load its files."""
    heard: list[Message] = []
    service = Service()

    async def fake(reader, writer) -> None:
        peer = Peer(reader, writer)
        await peer.say(Challenge(bytes(16)))
        heard.append(await peer.hear(0))
        await peer.say(Joined(proof))
        frame = b"\x93\x01\xa4load\x91\xa5/file"
        writer.write(len(frame).to_bytes(4, "little") + frame)
        await reader.read()
        writer.close()

    async def main() -> object:
        server = await asyncio.start_server(fake, "127.0.0.1", 0)
        work = working(service, server.sockets[0].getsockname()[1])
        [error] = await asyncio.gather(work, return_exceptions=True)
        server.close()
        return error

    error = asyncio.run(main())
    assert isinstance(error, tep.RendezvousError)
    assert "does not know the token" in str(error)
    assert [] == service.loaded
    [asked] = heard
    assert isinstance(asked, Join)
    assert TOKEN not in repr(asked)
    assert TOKEN not in str(error)


def test_no_number_is_asked_for_twice() -> None:
    """A recorded proof would open the door again, at either end."""
    listeners, callers = set(), set()
    done = asyncio.Event()

    async def fake(reader, writer) -> None:
        peer = Peer(reader, writer)
        await peer.say(Challenge(bytes(16)))
        asked = await peer.hear(0)
        assert isinstance(asked, Join)
        callers.add(asked.nonce)
        writer.close()
        if len(callers) == 3:
            done.set()

    async def main() -> None:
        async with Listener(TOKEN) as listener:
            for _ in range(3):
                peer = Peer(*await asyncio.open_connection("127.0.0.1", listener.port))
                challenge = await peer.hear(0)
                assert isinstance(challenge, Challenge)
                listeners.add(challenge.nonce)
                await peer.close()
        server = await asyncio.start_server(fake, "127.0.0.1", 0)
        work = working(Service(), server.sockets[0].getsockname()[1])
        await asyncio.wait_for(done.wait(), 20.0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        server.close()

    asyncio.run(main())
    assert 3 == len(listeners)
    assert 3 == len(callers)
    assert {16} == {len(nonce) for nonce in listeners | callers}


def test_a_hub_that_never_comes_is_an_error_in_time() -> None:
    """A worker of a job whose hub is gone waits for ever otherwise, and nobody knows why."""

    async def main() -> None:
        async with Listener(TOKEN) as listener:
            port = listener.port
        with pytest.raises(tep.FabricError, match=r"no controller at 127.0.0.1:\d+ within 0.1 s"):
            await answer(Service(), "127.0.0.1", port, TOKEN, Hello("s", "w"), patience_s=0.1)

    asyncio.run(main())


def test_a_port_that_is_taken_is_named_with_the_way_out() -> None:
    """Under torchrun the controller listens beside torch's own store, and its port may be taken."""

    async def main() -> None:
        async with Listener(TOKEN) as first:
            with pytest.raises(tep.UsageError, match=f"{first.port}.*set TEP_RENDEZVOUS_PORT"):
                async with Listener(TOKEN, "127.0.0.1", first.port):
                    pass

    asyncio.run(main())


def test_the_error_of_another_hub_names_places_and_no_token() -> None:
    """The token of the weights' hub was in the text of an error, and so in everybody's logs."""
    worker = Worker(Fabric())
    try:
        meta = worker.prepare()
        worker._rank = 1
        with pytest.raises(tep.UsageError, match="make a new engine for another group") as caught:
            worker.join(2, 3, [meta])
        host, port, token = meta["hub"]
        assert f"{host}:{port}" in str(caught.value)
        assert token not in str(caught.value)
        assert token not in repr(Meeting(host, port, token))
    finally:
        worker.close()
