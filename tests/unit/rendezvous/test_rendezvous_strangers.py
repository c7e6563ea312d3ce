"""Strangers at a rendezvous: what an attacker sends, and what a crowd costs."""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
from collections.abc import Callable

import pytest

from tep import rendezvous
from tep.base.errors import RendezvousError, WaitTimeout
from tep.rendezvous import Place, wire
from tep.rendezvous.wire import (
    Challenge,
    Door,
    Join,
    Joined,
    Message,
    Peer,
    Refused,
    join_proof,
    prove,
)
from tests.support.ranks import TOKEN, begin, close, listen, meet, outcomes, place, start_rank


def errors_of(results: list[object]) -> list[str]:
    return [f"{type(result).__name__}: {result}" for result in results]


def test_a_stranger_who_talks_nonsense_is_turned_away_and_reported() -> None:
    """A port scanner, or a health check, must not end the job, nor make it allocate."""

    async def main() -> tuple[object, bytes]:
        zero, port = begin(2)
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x05\x00\x00\x00junk!", b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(nonsense)
            writer.write_eof()
            assert 4 < len(await reader.read()), "the challenge, and then the end"
            writer.close()
            await writer.wait_closed()
        silent, hush = await asyncio.open_connection("127.0.0.1", port)
        one = await rendezvous.join_async(place(1, 2, port), timeout_s=20.0)
        group = await zero
        cut = await asyncio.wait_for(silent.read(), 20.0)
        hush.close()
        [error] = await asyncio.gather(group.barrier(timeout_s=0.1), return_exceptions=True)
        await close([one, group])
        return error, cut

    error, cut = asyncio.run(main())
    assert isinstance(error, WaitTimeout)
    assert "missing: 1; refused 4: 127.0.0.1:" in str(error)
    assert "a frame of 542393671 bytes; 4096 are allowed here" in str(error)
    assert 4 < len(cut), "who says nothing is cut off once all ranks are here"


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until something is so."""
    async with asyncio.timeout(60):
        for _ in itertools.repeat(None):
            if condition():
                return
            await asyncio.sleep(0)


async def answer(port: int, token: str, proved: int, claimed: int) -> Message:
    """Knock as `claimed`, with a proof for rank `proved`; return what rank 0 says."""
    peer = Peer(*await asyncio.open_connection("127.0.0.1", port))
    challenge = await peer.hear(0)
    assert isinstance(challenge, Challenge)
    proof = join_proof(token, challenge.nonce, Join(2, ("rank", proved, 3), b"mine", b""))
    await peer.say(Join(2, ("rank", claimed, 3), b"mine", proof))
    said = await peer.hear(0)
    await peer.close()
    return said


@pytest.mark.parametrize("length", [0, 1, 31, 33])
def test_a_cut_proof_opens_nothing_at_either_end(length: int) -> None:
    """A proof compared only as far as it goes would let in whoever sends an empty one."""

    async def as_rank(port: int) -> Message:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", port))
        challenge = await peer.hear(0)
        assert isinstance(challenge, Challenge)
        proof = join_proof(TOKEN, challenge.nonce, Join(2, ("rank", 1, 2), b"mine", b""))
        await peer.say(Join(2, ("rank", 1, 2), b"mine", (proof + b"?")[:length]))
        said = await peer.hear(0)
        await peer.close()
        return said

    async def as_rank_0(reader, writer) -> None:
        peer = Peer(reader, writer)
        await peer.say(Challenge(bytes(16)))
        asked = await peer.hear(0)
        assert isinstance(asked, Join)
        await peer.say(Joined((prove(TOKEN, "joined", asked.nonce) + b"?")[:length]))
        await peer.close()

    async def main() -> tuple[Message, list[object]]:
        zero, port = begin(2)
        said = await as_rank(port)
        zero.cancel()
        await asyncio.gather(zero, return_exceptions=True)
        server = await asyncio.start_server(as_rank_0, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        joining = rendezvous.join_async(place(1, 2, port), timeout_s=20.0)
        results = await asyncio.gather(joining, return_exceptions=True)
        server.close()
        return said, results

    said, [error] = asyncio.run(main())
    assert isinstance(said, Refused)
    assert "wrong token" in said.why
    assert isinstance(error, RendezvousError)
    assert "does not know the token" in str(error)


NOT_UTF8 = b"\x92\x04\xa2\xff\xfe"


NESTED = b"\x93\x01\xc4\x00" + b"\x91" * 4000 + b"\xc0"


@pytest.mark.parametrize("body", [NOT_UTF8, NESTED])
def test_bytes_that_no_decoder_likes_end_one_connection(body: bytes) -> None:
    """msgspec raises UnicodeDecodeError and RecursionError beside its own errors.

    At rank 0 they left a connection open for ever; at another rank they escaped as they were.
    """
    frame = len(body).to_bytes(4, "little") + body

    async def chat(_, writer) -> None:
        writer.write(frame)
        await writer.drain()
        writer.close()

    async def main() -> tuple[bytes, list[object]]:
        zero, port = begin(2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(frame)
        rest = await asyncio.wait_for(reader.read(), 20.0)
        writer.close()
        zero.cancel()
        await asyncio.gather(zero, return_exceptions=True)
        server = await asyncio.start_server(chat, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        joining = rendezvous.join_async(place(1, 2, port), timeout_s=20.0)
        results = await asyncio.gather(joining, return_exceptions=True)
        server.close()
        return rest, results

    rest, [error] = asyncio.run(main())
    assert 4 < len(rest), "the challenge, and then the end"
    assert isinstance(error, RendezvousError)
    assert "that are no message" in str(error)


def test_silent_strangers_are_bounded_and_keep_nobody_out(capfd, monkeypatch) -> None:
    """Idle connections took all descriptors of rank 0, and no rank could join any more."""
    monkeypatch.setattr("tep.rendezvous.wire.STRANGERS_MAX", 8)
    monkeypatch.setattr("tep.rendezvous.wire.STRANGER_S", 1e9)  # their number ends them, not time

    async def main() -> tuple[int, list[list[bytes]]]:
        zero, port = begin(2)
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        async with asyncio.timeout(60):
            while len([1 for reader, _ in crowd if reader.at_eof()]) < 50 - 8:
                for reader, _ in crowd:
                    if reader._buffer:
                        await reader.read(len(reader._buffer))
                await asyncio.sleep(0)
        inside = sum(not reader.at_eof() for reader, _ in crowd)
        groups = [await rendezvous.join_async(place(1, 2, port), timeout_s=20.0), await zero]
        found = await asyncio.gather(*(group.all_gather(b"%d" % group.rank) for group in groups))
        for _, writer in crowd:
            writer.close()
        await close(groups)
        return inside, found

    inside, found = asyncio.run(main())
    assert inside <= 8
    assert [[b"0", b"1"]] * 2 == found
    assert "" == capfd.readouterr().err


async def inside_at_the_end(entrance, crowd, over) -> list[bool]:
    """Tell who of the crowd is inside still, then close everything."""
    inside = [not reader.at_eof() for reader, _ in crowd]
    over.set()
    await entrance.close()
    for _, writer in crowd:
        writer.close()
    return inside


def test_a_crowd_of_strangers_costs_nobody_a_place_who_has_proved_the_token(monkeypatch) -> None:
    """The oldest of all was a rank that was just let in."""
    monkeypatch.setattr("tep.rendezvous.wire.STRANGERS_MAX", 2)

    async def main() -> list[bool]:
        came, over = list[Peer](), asyncio.Event()

        async def admit(peer: Peer) -> None:
            peer.proven = not came
            came.append(peer)
            await over.wait()

        listener, port = listen()
        entrance = Door([listener], admit)
        crowd = []
        for _ in range(5):
            crowd.append(await asyncio.open_connection("127.0.0.1", port))
            await until(lambda: len(came) == len(crowd))
        await until(lambda: sum(not reader.at_eof() for reader, _ in crowd) <= 3)
        return await inside_at_the_end(entrance, crowd, over)

    assert [True, False, False, True, True] == asyncio.run(main())


def test_where_no_descriptor_is_left_the_oldest_stranger_gives_its_own(monkeypatch) -> None:
    """A program that holds nearly all of them let no rank in for as long as strangers may stay."""

    async def main() -> list[bool]:
        came, over, loop = list[Peer](), asyncio.Event(), asyncio.get_running_loop()
        accept, short = loop.sock_accept, [OSError(errno.EMFILE, "too many open files")]

        async def admit(peer: Peer) -> None:
            came.append(peer)
            await over.wait()

        async def scarce(sock: socket.socket) -> object:
            if short and came:
                raise short.pop()
            return await accept(sock)

        monkeypatch.setattr(loop, "sock_accept", scarce)
        listener, port = listen()
        entrance = Door([listener], admit)
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await until(lambda: len(came) == 2 and crowd[0][0].at_eof())
        return await inside_at_the_end(entrance, crowd, over)

    assert [False, True] == asyncio.run(main())


@pytest.mark.parametrize(("port", "addresses"), [(0, 1), (7, 2)])
def test_any_port_is_one_port(port, addresses, monkeypatch) -> None:
    """A host of two addresses would listen at two ports, and say one of them."""
    bound = []

    async def both(*_: object, **__: object) -> list[tuple[object, ...]]:
        hosts = ("127.0.0.1", "127.0.0.2")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
        await wire.listen("some.host", port)

    monkeypatch.setattr(wire.socket, "create_server", lambda where, family: bound.append(where))
    asyncio.run(main())
    assert addresses == len(bound)


@pytest.mark.slow
def test_a_silent_stranger_is_dropped_at_a_deadline(monkeypatch) -> None:
    """Whoever says nothing held a descriptor of rank 0 for as long as it waited."""
    monkeypatch.setattr("tep.rendezvous.wire.STRANGER_S", 0.05)

    async def main() -> tuple[bytes, object]:
        listener, port = listen()
        zero = asyncio.ensure_future(
            rendezvous.join_async(place(0, 2, port), timeout_s=1.0, listener=listener)
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        told = await asyncio.wait_for(reader.read(), 20.0)
        [error] = await asyncio.gather(zero, return_exceptions=True)
        writer.close()
        return told, error

    told, error = asyncio.run(main())
    assert 4 < len(told)
    assert isinstance(error, WaitTimeout)
    assert "silent for 0.05 s" in str(error)


NO_DESCRIPTORS = """
import os, resource, socket
from tep import rendezvous
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
soft = len(os.listdir("/proc/self/fd")) + 24
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(port, flush=True)
try:
    with rendezvous.join(rendezvous.Place(rank=0, size=3, port=port, token="t"),
                         timeout_s=6, listener=listener): pass
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_rank_gets_in_while_strangers_hold_all_descriptors() -> None:
    """At the limit of descriptors asyncio's server logs each attempt and stops for a second.

    Rank 0 then filled stderr with megabytes, let no rank in, and noticed its own time-out late.
    """
    process = start_rank("-c", NO_DESCRIPTORS)
    port = int(process.stdout.readline())
    crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]

    async def join() -> object:
        joining = rendezvous.join_async(
            Place(rank=1, size=3, port=port, token="t"),  # noqa: S106  # of this test
            timeout_s=20.0,
        )
        return (await asyncio.gather(joining, return_exceptions=True))[0]

    error = asyncio.run(join())
    [(_, said, errors)] = outcomes([process])
    for sock in crowd:
        sock.close()

    assert isinstance(error, WaitTimeout), error
    assert "missing: 2" in str(error), "rank 1 was let in, and told who is missing"
    assert "WaitTimeout rendezvous: join: 2 of 3 ranks" in said
    assert "" == errors


def test_a_proof_is_good_for_one_rank_only() -> None:
    """An eavesdropper on rank 1 must not be able to join as rank 2."""

    async def main() -> list[Message]:
        zero, port = begin(3)
        said = [
            await answer(port, TOKEN, 1, 2),
            await answer(port, TOKEN + "?", 1, 1),
            await answer(port, TOKEN, 1, 1),
        ]
        zero.cancel()
        await asyncio.gather(zero, return_exceptions=True)
        return said

    assert [Refused, Refused, Joined] == [type(said) for said in asyncio.run(main())]


def test_a_frame_beyond_the_limit_names_its_rank() -> None:
    """A program at the other end that is not ours must not make rank 0 allocate gigabytes."""

    async def main() -> list[object]:
        groups = await meet(3)
        groups[1]._peers[0]._writer.write(b"\xff\xff\xff\xff")
        results = await asyncio.gather(
            *(groups[rank].barrier(timeout_s=20.0) for rank in (0, 2)), return_exceptions=True
        )
        await close(groups)
        return results

    results = asyncio.run(main())
    assert [RendezvousError] * 2 == [type(result) for result in results], errors_of(results)
    assert all(
        "rank 1 is gone at barrier 1 (RendezvousError: a frame of" in str(r) for r in results
    )


def test_something_else_at_the_port_is_no_rank_0() -> None:
    """Whoever answers has to prove that it knows the token, before it is told anything."""

    async def main() -> object:
        async def chat(reader, writer) -> None:
            writer.write(b"220 mail.example.org ESMTP\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(chat, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        [error] = await asyncio.gather(
            rendezvous.join_async(place(1, 2, port), timeout_s=20.0), return_exceptions=True
        )
        server.close()
        return error

    error = asyncio.run(main())
    assert isinstance(error, RendezvousError)
    assert "not rank 0 of this job" in str(error)


def test_a_rank_that_left_while_others_came_may_come_again() -> None:
    """A job's rank is restarted by its launcher; the first one's place must not stay taken."""

    async def main() -> list[list[bytes]]:
        zero, port = begin(3)
        assert isinstance(await answer(port, TOKEN, 1, 1), Joined)
        both = [
            asyncio.ensure_future(rendezvous.join_async(place(rank, 3, port), timeout_s=20.0))
            for rank in (1, 2)
        ]
        groups = [await task for task in (zero, *both)]
        found = await asyncio.gather(*(group.all_gather(b"%d" % group.rank) for group in groups))
        await close(groups)
        return found

    assert [[b"0", b"1", b"2"]] * 3 == asyncio.run(main())
