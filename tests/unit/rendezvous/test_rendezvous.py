"""The rendezvous: ranks as tasks of one loop, as threads, and as processes; no fixed port."""

from __future__ import annotations

import asyncio

import pytest

from tep import rendezvous
from tep.base.errors import RendezvousError, UsageError, WaitTimeout
from tep.rendezvous import Place, ranks, wire
from tep.rendezvous.wire import Got, Message
from tests.support.ranks import TOKEN, begin, close, listen, meet, outcomes, place, start_ranks


def errors_of(results: list[object]) -> list[str]:
    return [f"{type(result).__name__}: {result}" for result in results]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_gather_returns_everybodys_bytes_by_rank(size: int) -> None:
    """A descriptor under the wrong rank sends pages to the wrong process."""

    async def main() -> list[list[bytes]]:
        groups = await meet(size)
        first = await asyncio.gather(
            *(group.all_gather(b"rank %d" % group.rank) for group in groups)
        )
        second = await asyncio.gather(
            *(group.all_gather(bytes(group.rank * 70_000)) for group in reversed(groups))
        )
        await asyncio.gather(*(group.barrier() for group in groups))
        await close(groups)
        assert [[bytes(rank * 70_000) for rank in range(size)]] * size == second
        return first

    assert [[b"rank %d" % rank for rank in range(size)]] * size == asyncio.run(main())


def test_a_barrier_lets_nobody_pass_before_the_last() -> None:
    """Memory is freed after a barrier: one rank too early, and a peer still writes there."""

    async def main() -> None:
        groups = await meet(3)
        early = [asyncio.ensure_future(group.barrier()) for group in groups[:2]]
        for _ in range(50):
            await asyncio.sleep(0)
        assert not any(task.done() for task in early)
        await groups[2].barrier()
        await asyncio.gather(*early)
        await close(groups)

    asyncio.run(main())


@pytest.mark.slow
def test_who_is_missing_is_said_to_all_who_came() -> None:
    """A bare "timed out" sends people through the logs of a thousand ranks."""

    async def main() -> list[object]:
        listener, port = listen()
        return await asyncio.gather(
            *(
                rendezvous.join_async(
                    place(rank, 4, port), timeout_s=1.5, listener=None if rank else listener
                )
                for rank in (0, 2)
            ),
            return_exceptions=True,
        )

    zero, two = asyncio.run(main())
    assert [WaitTimeout] * 2 == [type(zero), type(two)]
    assert "join: 2 of 4 ranks within 1.5 s; missing: 1, 3" in str(zero)
    assert "missing: 1, 3 (says rank 0)" in str(two)


@pytest.mark.slow
def test_a_late_rank_is_named_at_the_collective() -> None:
    """A rank that hangs in its set-up stops all others; they have to learn which one it is."""

    async def main() -> list[object]:
        groups = await meet(3)
        results = await asyncio.gather(
            *(groups[rank].all_gather(b"x", timeout_s=1.0) for rank in (0, 2)),
            return_exceptions=True,
        )
        await close(groups)
        return results

    results = asyncio.run(main())
    assert [WaitTimeout] * 2 == [type(result) for result in results]
    assert all("all_gather 1: 2 of 3 ranks within 1.0 s; missing: 1" in str(r) for r in results)


def test_without_rank_0_the_others_say_so() -> None:
    """The address may be wrong, or rank 0 dead: both look like silence."""
    listener, port = listen()
    listener.close()
    with pytest.raises(WaitTimeout, match=f"found no rank 0 at 127.0.0.1:{port} .* missing: 0"):
        asyncio.run(rendezvous.join_async(place(1, 2, port), timeout_s=0.2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 1, "size": 2, "token": TOKEN[1:]}, "wrong token; set the same TEP_TOKEN"),
        ({"rank": 1, "size": 3, "token": TOKEN}, "rank 1 has world size 3, rank 0 has 2"),
        ({"rank": 2, "size": 2, "token": TOKEN}, "rank 2 is not among 1 to 1"),
        ({"rank": 5, "size": 2, "token": TOKEN}, "rank 5 is not among 1 to 1"),
    ],
)
def test_a_wrong_rank_is_refused_with_the_reason_and_harms_nobody(
    wrong, message, monkeypatch
) -> None:
    """Two jobs on one port must not mix, and must not end each other either."""
    monkeypatch.setattr(Place, "__post_init__", lambda _: None)  # another release's may not look

    async def main() -> tuple[object, list[list[bytes]]]:
        zero, port = begin(2)
        [refused] = await asyncio.gather(
            rendezvous.join_async(Place(port=port, **wrong), timeout_s=20.0),
            return_exceptions=True,
        )
        groups = [await rendezvous.join_async(place(1, 2, port), timeout_s=20.0), await zero]
        groups.reverse()
        found = await asyncio.gather(*(group.all_gather(b"%d" % group.rank) for group in groups))
        await close(groups)
        return refused, found

    refused, found = asyncio.run(main())
    assert isinstance(refused, UsageError)
    assert message in str(refused)
    assert [[b"0", b"1"]] * 2 == found


def test_a_rank_that_is_here_already_is_refused() -> None:
    """Two processes with one rank would share its addresses, and lose each other's pages."""

    async def main() -> list[object]:
        zero, port = begin(3)
        twins = [
            asyncio.ensure_future(rendezvous.join_async(place(1, 3, port), timeout_s=20.0))
            for _ in range(2)
        ]
        [refused], [other] = await asyncio.wait(twins, return_when=asyncio.FIRST_COMPLETED)
        last = await rendezvous.join_async(place(2, 3, port), timeout_s=20.0)
        await close([last, await zero, await other])
        return [refused.exception()]

    [second] = asyncio.run(main())
    assert isinstance(second, UsageError)
    assert "rank 1 is here already, from 127.0.0.1:" in str(second)


def test_the_answer_of_all_gather_is_encoded_once_and_sent_in_pieces(monkeypatch) -> None:
    """Encoded and buffered for each rank, N parts cost rank 0 N x N of memory."""
    size, part = 12, 100_000
    encoded: list[int] = []
    buffered: list[int] = []
    make, send = wire.frame, asyncio.StreamWriter.write

    def counted(message: Message) -> bytes:
        data = make(message)
        if isinstance(message, Got) and message.turn:
            encoded.append(len(data))
        return data

    def watched(writer: asyncio.StreamWriter, data: bytes) -> None:
        send(writer, data)
        buffered.append(writer.transport.get_write_buffer_size())

    async def main() -> list[list[bytes]]:
        groups = await meet(size)
        monkeypatch.setattr(ranks, "frame", counted)
        monkeypatch.setattr(asyncio.StreamWriter, "write", watched)
        found = await asyncio.gather(*(group.all_gather(bytes(part)) for group in groups))
        await close(groups)
        return found

    assert [[bytes(part)] * size] * size == asyncio.run(main())
    assert 1 == len(encoded)
    assert size * part <= encoded[0] < size * (part + 16)
    assert max(buffered) <= 1 << 16


def test_what_cannot_be_gathered_is_refused_and_ends_nothing() -> None:
    """bytes(5) is five zeros; and one rank's slip must not take the others' group away."""

    async def main() -> list[list[bytes]]:
        groups = await meet(2)
        with pytest.raises(UsageError, match="takes bytes, not int"):
            await groups[0].all_gather(5)  # type: ignore[arg-type]  # that is the point
        with pytest.raises(UsageError, match="all_gather of 1048577 bytes; 1048576 a rank"):
            await groups[1].all_gather(bytes((1 << 20) + 1))
        first = asyncio.ensure_future(groups[0].all_gather(bytes(1 << 20)))
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="barrier while another call is under way"):
            await groups[0].barrier()
        found = [await groups[1].all_gather(bytearray(b"x")), await first]
        await close(groups)
        return found

    assert [[bytes(1 << 20), b"x"]] * 2 == asyncio.run(main())


def test_the_blocking_form_can_be_closed_twice_and_then_refuses() -> None:
    """`with` and close() together are usual; the second must not raise from asyncio's depths."""
    with rendezvous.join(place(0, 1, 1)) as group:
        assert [b"alone"] == group.all_gather(b"alone")
        group.barrier()
        group.close()
    with pytest.raises(UsageError, match="barrier after close"):
        group.barrier()


def test_a_rank_that_dies_is_named() -> None:
    """A crash before the exchange is an error at once, not after the timeout."""

    async def main() -> list[object]:
        groups = await meet(3)
        await groups[1].close()
        results = await asyncio.gather(
            *(groups[rank].barrier(timeout_s=20.0) for rank in (0, 2)), return_exceptions=True
        )
        await close(groups)
        return results

    results = asyncio.run(main())
    assert [RendezvousError] * 2 == [type(result) for result in results], errors_of(results)
    assert all("rank 1 is gone at barrier 1" in str(result) for result in results)


def test_ranks_that_call_different_things_are_told() -> None:
    """One rank a call ahead would take its peers' answers for another question's."""

    async def main() -> list[object]:
        groups = await meet(2)
        results = await asyncio.gather(
            groups[0].barrier(timeout_s=20.0),
            groups[1].all_gather(b"x", timeout_s=20.0),
            return_exceptions=True,
        )
        after = await asyncio.gather(groups[0].barrier(), return_exceptions=True)
        await close(groups)
        return [*results, *after]

    results = asyncio.run(main())
    assert [RendezvousError, RendezvousError, UsageError] == [type(result) for result in results]
    assert "rank 1 is at all_gather 1, rank 0 at barrier 1" in str(results[0])


def test_the_environment_of_torchrun_is_enough() -> None:
    """A script that runs under torchrun needs one line and no options."""
    env = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    found = Place.from_env({**env, "TORCHELASTIC_RUN_ID": TOKEN})

    assert Place(rank=3, size=8, host="10.0.0.1", port=29500, token=TOKEN) == found
    env["TEP_TOKEN"] = TOKEN
    assert 29502 == Place.from_env({**env, "TEP_RENDEZVOUS_PORT": "29502"}).port
    # There torchrun's own store listens on MASTER_PORT.
    assert 29501 == Place.from_env({**env, "TORCHELASTIC_USE_AGENT_STORE": "True"}).port
    assert TOKEN not in repr(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": ""}, "RANK not set; start with torchrun"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no number"),
        ({"RANK": "2"}, "rank=2 size=2; 0 <= rank < size <= 4095"),
        ({"TEP_TOKEN": ""}, "no token; give token=, or set TEP_TOKEN"),
        ({"MASTER_PORT": "65536"}, "port=65536; 0 to 65535"),
        ({"WORLD_SIZE": "5000"}, "rank=0 size=5000; 0 <= rank < size <= 4095"),
    ],
)
def test_a_bad_environment_is_named(change, message) -> None:
    """KeyError: 'RANK' tells a reader of logs nothing about what to do."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", "TEP_TOKEN": "t"}
    with pytest.raises(UsageError, match=message):
        Place.from_env({**env, **change})


def test_nowhere_to_meet_is_said_at_once() -> None:
    """Port 0 is any port: the others could never find it."""
    with pytest.raises(UsageError, match="rank 1 of 2 has no port"):
        rendezvous.join(place(1, 2, 0))


def test_a_rank_alone_needs_no_port() -> None:
    """A program that is started without a launcher has none."""
    with rendezvous.join(Place(rank=0, size=1, port=0, token=TOKEN)) as group:
        assert [b"x"] == group.all_gather(b"x")


def test_the_report_of_rank_0_is_waited_for() -> None:
    """The others would give up just before it, and say who is missing to nobody."""

    async def main() -> list[object]:
        groups = await meet(3)
        found = await asyncio.gather(
            groups[0].barrier(timeout_s=0.4),
            groups[1].barrier(timeout_s=0.1),
            return_exceptions=True,
        )
        await close(groups)
        return list(found)

    zero, one = asyncio.run(main())
    assert "rendezvous: barrier 1: 2 of 3 ranks within 0.4 s; missing: 2" in str(zero)
    assert f"{zero} (says rank 0)" == str(one)


def test_a_taken_port_is_named() -> None:
    """torch's own store listens on MASTER_PORT; the way round it belongs into the message."""
    listener, port = listen()
    with listener, pytest.raises(UsageError, match="cannot listen on 127.0.0.1:.*TEP_RENDEZVOUS"):
        rendezvous.join(place(0, 2, port), timeout_s=20.0)


def test_the_blocking_form_refuses_to_block_a_running_loop() -> None:
    """In a notebook it would raise from the depths of asyncio, or hang the kernel."""

    async def main() -> None:
        with pytest.raises(UsageError, match="use `await join_async"):
            rendezvous.join(place(0, 1, 1))
        with pytest.raises(UsageError, match="await exchange_async"):
            rendezvous.exchange(b"x", place(0, 1, 1))

    asyncio.run(main())


SCRIPT = """
import os, socket, sys
from tep import rendezvous
from tep.rendezvous import Place
rank = int(os.environ["RANK"])
if rank == 0:
    listener = socket.socket(fileno=int(sys.argv[1]))
    group = rendezvous.join(listener=listener, timeout_s=60)
else:
    group = rendezvous.join(timeout_s=60)
with group:
    found = group.all_gather(b"process %d" % rank)
    group.barrier()
print(b",".join(found).decode())
"""


@pytest.mark.slow
def test_processes_meet_by_environment() -> None:
    """The blocking form's loop runs inside calls only: what was sent must be out by then."""
    listener, port = listen()
    with listener:
        ranks = start_ranks(3, port, "-c", SCRIPT, listener.fileno(), fds=[listener.fileno()])
        ended = outcomes(ranks)

    assert ["process 0,process 1,process 2\n"] * 3 == [out for _, out, _ in ended], ended
