"""Moving one file from an engine to another: both here, or the receiver in a process of its own.

PAIRS is the table of runs between two processes. The sender asks the receiver, one question after
the other, by a method's name; the file itself goes by one-sided writes alone.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import queue
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

import tep
from tep.backends import BACKENDS
from tep.base.errors import BackendUnavailable, FabricError, TepError, WaitTimeout
from tep.base.waiting import system_s

__all__ = ["PAIRS", "LeftOut", "Moved", "Pair", "Remote", "count_overtakes", "move", "move_between"]

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

_IMM: Final = 42
_WARM_IMM: Final = 43
_FENCE_IMM: Final = 44
_FIRST_OF_MANY: Final = 1 << 16
_WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One run: the transfer, and its result at the receiver.

    Attributes:
        fabric: the fabric, with its profile or seed.
        processes: number of processes of sender and receiver together.
        pages: writes with an immediate.
        nics: NICs of the sender -> of the receiver.
        nic_bytes: bytes that each NIC of the sender carried.
        imms_expected, imms_counted: numbers of immediates at the receiver.
        overtakes: immediates that arrived before one of an earlier page.
        sim_us: simulated time from submit to the receiver's count, if time is simulated.
        gbps: rate over that time.
        published_gbps: the paper's figure for this NIC and page size, if it has one.
        real_us: time on this machine's clock from submit to the receiver's count, if two
            processes ran; the median of the rounds.
        gbytes_per_s: rate over that time.
        sha256: digest of the received bytes.
        agrees: True if it is the file's digest.
    """

    fabric: str
    processes: int = 1
    pages: int
    nics: str
    nic_bytes: tuple[int, ...]
    imms_expected: int
    imms_counted: int
    overtakes: int
    sim_us: float | None = None
    gbps: float | None = None
    published_gbps: float | None = None
    real_us: float | None = None
    gbytes_per_s: float | None = None
    sha256: str
    agrees: bool


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run that this machine cannot make: the reason, the attempts, and the remedy."""

    fabric: str
    why: str
    tried: tuple[tuple[str, str], ...]
    cure: str


@dataclass(frozen=True, slots=True)
class Pair:
    """One run between two processes.

    Attributes:
        fabric: its name in the table.
        backend: the backend of both ends.
        sender, receiver: the other arguments of TransferEngine.open.
    """

    fabric: str
    backend: str
    sender: Mapping[str, Any]
    receiver: Mapping[str, Any]


_TWO_TCP: Final[Mapping[str, Any]] = MappingProxyType(
    {"provider": "tcp", "nics": ("127.0.0.1", "127.0.0.2")}
)

PAIRS: Final = (
    Pair("libfabric tcp", "libfabric", _TWO_TCP, _TWO_TCP),
    Pair("local", "local", {"nics": 2}, {"nics": 2}),
)
"""The runs, in order; one whose backend is missing is left out, and the reason is shown."""


def move_between(pair: Pair, data: U8, page_bytes: int, *, seed: int) -> Moved | LeftOut:
    """Move `data` from this process to another one as pages in random order, three times.

    Args:
        pair: the backend and its options.
        data: same as for `move`.
        page_bytes: length of a page.
        seed: seed of the page order on both sides.

    Returns:
        The record of the run; or the reason why this machine cannot make it.

    Raises:
        FabricError: it began, and failed.
    """
    try:
        with (
            tep.TransferEngine.open(pair.backend, name="demo-sender", **pair.sender) as sender,
            Remote(pair) as receiver,
        ):
            receiver.ask("open", pair.backend, dict(pair.receiver))
            return move(pair.fabric, sender, receiver, data, page_bytes, seed=seed)
    except BackendUnavailable as error:
        why = str(error).splitlines()[0]
        return LeftOut(pair.fabric, why, tuple(error.tried), BACKENDS[pair.backend].cure)


def move(
    fabric: str,
    sender: tep.TransferEngine,
    receiver: Remote | Here,
    data: U8,
    page_bytes: int,
    *,
    seed: int,
    simulated: bool = False,
    published_gbps: float | None = None,
) -> Moved:
    """Move `data` from an engine to the receiver's as pages in random order, and check the result.

    Between two processes it is moved several times, after a handshake that is not timed.

    Args:
        fabric: name of the run.
        sender: the sending engine.
        receiver: its engine is open.
        data: uint8[n], n >= 1; the last page is filled up with zeros.
        page_bytes: length of a page.
        seed: seed of the page order on both sides.
        simulated: True if the engines' clock is a simulated one.
        published_gbps: the published number to show beside the result.
    """
    npages = -(-len(data) // page_bytes)
    source = np.zeros(npages * page_bytes, np.uint8)
    source[: len(data)] = data
    order, slots = _page_places(npages, seed)
    mr, _ = sender.reg_mr(source, access=tep.Access.SOURCE)
    desc = tep.MrDesc.from_bytes(receiver.ask("reg", len(data), npages, page_bytes, seed))
    src, dst = (mr, tep.Pages(order)), (desc, tep.Pages(slots[order]))
    digest = hashlib.sha256(data.tobytes()).hexdigest()
    remote = isinstance(receiver, Remote)
    if remote:  # the first row to a peer waits for a handshake, which is no part of the transfer
        sender.submit_barrier([desc], _WARM_IMM).wait(_WAIT_S)
    rounds = [_round(sender, receiver, page_bytes, src, dst) for _ in range(3 if remote else 1)]
    wrong = [one for one in rounds if one[1:3] != (npages, digest)]
    _, counted, sha256, nic_bytes = wrong[0] if wrong else rounds[-1]
    us = statistics.median(took_s for took_s, *_ in rounds) * 1e6
    moved = Moved(
        fabric=fabric,
        processes=1 + remote,
        pages=npages,
        nics=f"{len(sender.main_address.domains)} -> {len(desc.addr.domains)}",
        nic_bytes=nic_bytes,
        imms_expected=npages,
        imms_counted=counted,
        overtakes=_overtakes(sender, receiver, page_bytes, src, dst),
        sim_us=us if simulated else None,
        gbps=len(source) * 8 / us / 1e3 if simulated else None,
        published_gbps=published_gbps,
        real_us=us if remote else None,
        gbytes_per_s=len(source) / us / 1e3 if remote else None,
        sha256=sha256,
        agrees=sha256 == digest,
    )
    sender.deregister(mr)
    return moved


def _round(
    sender: tep.TransferEngine,
    receiver: Remote | Here,
    page_bytes: int,
    src: tuple[tep.MrHandle, tep.Pages],
    dst: tuple[tep.MrDesc, tep.Pages],
) -> tuple[float, int, str, tuple[int, ...]]:
    """Send all pages with one immediate; return seconds, the count, the digest, bytes by NIC."""
    receiver.ask("expect", _IMM)
    receiver.say("arrived")
    start_s = sender.driver.now_s()  # two processes of a machine have one clock
    sent = sender.submit_paged_writes(page_bytes, src, dst, imm=_IMM)
    took_s = receiver.hear("arrived") - start_s
    sent.wait(_WAIT_S)
    return took_s, *receiver.ask("check"), tuple(nic.nbytes for nic in sent.stats().nics)


def _page_places(npages: int, seed: int) -> tuple[I64, I64]:
    """Return the order in which pages are sent, and the slot of each page at the receiver."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(npages)
    return rng.permutation(npages), slots


def _overtakes(
    sender: tep.TransferEngine,
    receiver: Remote | Here,
    page_bytes: int,
    src: tuple[tep.MrHandle, tep.Pages],
    dst: tuple[tep.MrDesc, tep.Pages],
) -> int:
    """Send the same pages again, each with its own number as immediate; check their order."""
    receiver.ask("number")
    imms = np.arange(_FIRST_OF_MANY, _FIRST_OF_MANY + len(src[1]))
    sender.submit_paged_writes(page_bytes, src, dst, imm=imms).wait(_WAIT_S)
    while True:
        # The pages are there now, but the receiver may not have polled; a fence makes it poll.
        receiver.say("numbers")
        sender.submit_barrier([dst[0]], _FENCE_IMM).wait(_WAIT_S)
        numbers = receiver.hear("numbers")
        if len(numbers) >= len(imms):
            return count_overtakes(numbers)


def count_overtakes(numbers: Sequence[int]) -> int:
    """Count the numbers that stand before a smaller one."""
    arrived = np.array(numbers)
    later = np.minimum.accumulate(arrived[::-1])[::-1]
    return int(np.count_nonzero(arrived[:-1] > later[1:]))


class Here:
    """A receiver in this process: it answers when it is heard."""

    def __init__(self, engine: tep.TransferEngine) -> None:
        self._receiving = _Receiving()
        self._receiving.engine = engine
        self._said: tuple[Any, ...] = ()

    def ask(self, do: str, *arguments: object) -> Any:
        """Call a method of the receiver."""
        return getattr(self._receiving, do)(*arguments)

    def say(self, *said: object) -> None:
        """Say which method `hear` calls."""
        self._said = said

    def hear(self, _do: str) -> Any:
        """Call it."""
        return self.ask(*self._said)


class Remote:
    """A receiver in another process, which it starts, and ends."""

    def __init__(self, pair: Pair) -> None:
        self._what = f"the receiver of {pair.fabric}"
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_receive, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, do: str, *arguments: object) -> Any:
        """Send a question and return the answer; raise an error of the receiver here."""
        self.say(do, *arguments)
        return self.hear(do)

    def say(self, *said: object) -> None:
        """Send a question."""
        try:
            self._pipe.send(said)
        except OSError as error:
            raise FabricError(f"{self._what} has ended", code="UNREACHABLE") from error

    def hear(self, do: str) -> Any:
        """Wait for the answer."""
        try:
            if not self._pipe.poll(system_s(2 * _WAIT_S)):
                raise WaitTimeout(f"{self._what} did not answer {do!r} within {2 * _WAIT_S:g} s")
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise FabricError(f"{self._what} ended before {do!r}", code="UNREACHABLE") from error
        if isinstance(answer, BackendUnavailable):
            raise answer
        if isinstance(answer, TepError):
            raise FabricError(f"{self._what}: {type(answer).__name__}: {answer}") from answer
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self.process.join(10)
        self.process.kill()
        self.process.join()


class _Receiving:
    """The receiver's side; each method answers a question of its name."""

    engine: tep.TransferEngine

    def open(self, backend: str, options: dict[str, Any]) -> None:
        """Open the engine."""
        self.engine = tep.TransferEngine.open(backend, name="demo-receiver", **options)

    def reg(self, nbytes: int, npages: int, page_bytes: int, seed: int) -> bytes:
        """Register memory for the file; return its descriptor."""
        self.nbytes, self.shape = nbytes, (npages, page_bytes)
        _, self.slots = _page_places(npages, seed)
        self.target = np.zeros(npages * page_bytes, np.uint8)
        return self.engine.reg_mr(self.target)[1].to_bytes()

    def expect(self, imm: int) -> None:
        """Wipe the memory, and begin to count."""
        self.target[:] = 0
        self.expected = self.engine.expect_imm_count(imm, self.shape[0])

    def arrived(self) -> float:
        """Wait for the count; return the time at which it was reached."""
        self.expected.wait(_WAIT_S)
        return self.engine.driver.now_s()

    def check(self) -> tuple[int, str]:
        """Return the number of immediates, and the digest of the memory."""
        landed = self.target.reshape(self.shape)[self.slots].reshape(-1)[: self.nbytes]
        beyond = dict(self.engine.stats().imms_unexpected).get(_IMM, 0)
        return self.expected.count + beyond, hashlib.sha256(landed.tobytes()).hexdigest()

    def number(self) -> None:
        """Record from now on the order in which the pages' own numbers come."""
        self.came: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.numbered: list[int] = []
        pages = range(_FIRST_OF_MANY, _FIRST_OF_MANY + self.shape[0])

        def keep(imm: int, count: int) -> None:
            for _ in range(count):
                self.came.put(imm)

        self.engine.on_imm(pages, keep)

    def numbers(self) -> list[int]:
        """Wait for a fence; return the numbers that have come."""
        self.engine.expect_imm_count(_FENCE_IMM, 1).wait(_WAIT_S)
        while not self.came.empty():
            self.numbered.append(self.came.get())
        return self.numbered


def _receive(pipe: Connection) -> None:
    """Answer questions until there are no more."""
    receiving = _Receiving()
    try:
        while True:
            do, *arguments = pipe.recv()
            try:
                answer = getattr(receiving, do)(*arguments)
            except TepError as error:
                answer = error
            pipe.send(answer)
    except (EOFError, OSError):
        pass  # the sender has closed its end
    if hasattr(receiving, "engine"):
        receiving.engine.close()
