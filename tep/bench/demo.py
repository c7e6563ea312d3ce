"""A file moved from one engine to another, over every fabric that runs on this machine.

The receiver learns from its count of immediates alone that the file is there; the SHA-256 is taken
afterwards. The receiver is a generator of what its sender waits for; from another process a pipe
brings that. The file itself goes by one-sided writes alone.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

import tep
from tep.backends import BACKENDS
from tep.base.errors import BackendUnavailable, FabricError, TepError, UsageError, WaitTimeout
from tep.base.waiting import system_s
from tep.bench.reproduce.tables import paged_gbps
from tep.sim import Cluster

__all__ = [
    "PAIRS", "File", "LeftOut", "Moved", "Pair", "move", "move_between", "read_file", "receive",
    "remote", "ways",
]  # fmt: skip

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

_PROFILES: Final = ("efa_2x200", "efa_4x100", "cx7_400")
_IMM: Final = 42
_WARM_IMM: Final = 43
_WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One run: the transfer, and its result at the receiver.

    Attributes:
        fabric: with its profile or seed.
        processes: of sender and receiver together.
        pages: writes with an immediate.
        nics: NICs of the sender -> of the receiver.
        nic_bytes: bytes that each NIC of the sender carried.
        imms_expected, imms_counted: numbers of immediates at the receiver.
        us: from the submit to the receiver's count, by the clock of the engines: this machine's or
            a simulated one; between two processes the median of the rounds.
        gbps: rate over that time.
        published_gbps: the paper's figure for this NIC and page size, if it has one.
        sha256: of the received bytes; `agrees` if it is the file's.
    """

    fabric: str
    processes: int = 1
    pages: int
    nics: str
    nic_bytes: tuple[int, ...]
    imms_expected: int
    imms_counted: int
    us: float
    gbps: float
    published_gbps: float | None = None
    sha256: str
    agrees: bool


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run that this machine cannot make: the reason, the attempts, and the remedy."""

    fabric: str
    why: str
    tried: tuple[tuple[str, str], ...]
    cure: str


class Pair(NamedTuple):
    """One run between two processes: its name, the backend, and the options of both ends."""

    fabric: str
    backend: str
    sender: Mapping[str, Any]
    receiver: Mapping[str, Any]


_TWO_TCP: Final = {"provider": "tcp", "nics": ("127.0.0.1", "127.0.0.2")}

PAIRS: Final = (
    Pair("libfabric tcp", "libfabric", _TWO_TCP, _TWO_TCP),
    Pair("local", "local", {"nics": 2}, {"nics": 2}),
)
"""The runs, in order; one whose backend is missing is left out, and the reason is shown."""


class File(NamedTuple):
    """The file as both ends see it.

    Attributes:
        nbytes: its length, 1 or more; the last page is filled up with zeros.
        page_bytes: length of a page.
        seed: of the order in which pages are sent, and of their places.
        rounds: how often it is moved.
    """

    nbytes: int
    page_bytes: int
    seed: int
    rounds: int = 1

    @property
    def npages(self) -> int:
        """The number of pages."""
        return -(-self.nbytes // self.page_bytes)

    def places(self) -> tuple[I64, I64]:
        """Return the order in which pages are sent, and the slot of each page at the receiver."""
        rng = np.random.default_rng(self.seed)
        slots = rng.permutation(self.npages)
        return rng.permutation(self.npages), slots


def read_file(path: Path) -> U8:
    """Map the bytes of a file, without a copy; UsageError if it cannot be read, or is empty."""
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # the latter: it is empty
        raise UsageError(
            f"tep demo: --file {path}: {error}; give a file that can be read, and is not empty"
        ) from error


def ways(data: U8, page_bytes: int, seed: int) -> list[Callable[[], Moved | LeftOut]]:
    """Return the runs of `data`, uint8[n], to be called in order: two processes, then one."""
    file = File(len(data), page_bytes, seed)
    return [
        *(partial(move_between, pair, data, page_bytes, seed=seed) for pair in PAIRS),
        partial(_loopback, data, file),
        *(partial(_simulated, name, data, file) for name in ("chaos", *_PROFILES)),
    ]


def _loopback(data: U8, file: File) -> Moved:
    with ExitStack() as stack:
        sender, receiver = [
            stack.enter_context(tep.TransferEngine.open("loopback", nics=nics, name=f"demo-{nics}"))
            for nics in (2, 4)
        ]
        return move("loopback", sender, receive(receiver, file), data, file)


def _simulated(name: str, data: U8, file: File) -> Moved:
    """Move the file over the chaos fabric, or the machines of a profile."""
    chaos = name == "chaos"
    machine = None if chaos else name
    with Cluster(2, (2, 4) if chaos else None, machine, seed=file.seed) as cluster:
        sender, receiver = cluster.engines
        return move(
            f"chaos, seed {file.seed}" if chaos else f"timing, {name}",
            *(sender, receive(receiver, file), data, file),
            published_gbps=None if chaos else paged_gbps(name, file.page_bytes),
        )


def move_between(pair: Pair, data: U8, page_bytes: int, *, seed: int) -> Moved | LeftOut:
    """Move `data`, uint8[n], from this process to another as pages in random order, three times.

    Returns the record of the run, or the reason why this machine cannot make it. FabricError: it
    began, and failed.
    """
    file = File(len(data), page_bytes, seed, rounds=3)
    try:
        with (
            tep.TransferEngine.open(pair.backend, name="demo-sender", **pair.sender) as sender,
            remote(pair, file) as answers,
        ):
            return move(pair.fabric, sender, answers, data, file, processes=2)
    except BackendUnavailable as error:
        why = str(error).splitlines()[0]
        return LeftOut(pair.fabric, why, tuple(error.tried), BACKENDS[pair.backend].cure)


def move(
    fabric: str,
    sender: tep.TransferEngine,
    answers: Iterator[Any],
    data: U8,
    file: File,
    *,
    processes: int = 1,
    published_gbps: float | None = None,
) -> Moved:
    """Move `data` from an engine to the receiver's as pages in random order, and check the result.

    `answers` are the receiver's, as `receive` yields them; between two processes a handshake comes
    first, which is not timed.
    """
    source = np.zeros(file.npages * file.page_bytes, np.uint8)
    source[: len(data)] = data
    order, slots = file.places()
    mr, _ = sender.reg_mr(source, access=tep.Access.SOURCE)
    desc = tep.MrDesc.from_bytes(next(answers))
    src, dst = (mr, tep.Pages(order)), (desc, tep.Pages(slots[order]))
    if processes == 2:
        sender.submit_barrier([desc], _WARM_IMM).wait(_WAIT_S)
    digest = hashlib.sha256(data.tobytes()).hexdigest()
    rounds = []
    for _ in range(file.rounds):
        next(answers)
        start_s = sender.driver.now_s()  # two processes of a machine have one clock
        sent = sender.submit_paged_writes(file.page_bytes, src, dst, imm=_IMM)
        arrived_s, *found = next(answers)
        sent.wait(_WAIT_S)
        rounds.append((arrived_s - start_s, found))
    wrong = [found for _, found in rounds if found != [file.npages, digest]]
    counted, sha256 = (wrong or [found])[0]
    us = statistics.median(took_s for took_s, _ in rounds) * 1e6
    sender.deregister(mr)
    return Moved(
        fabric=fabric,
        processes=processes,
        pages=file.npages,
        nics=f"{len(sender.main_address.domains)} -> {len(desc.addr.domains)}",
        nic_bytes=tuple(nic.nbytes for nic in sent.stats().nics),
        imms_expected=file.npages,
        imms_counted=counted,
        us=us,
        gbps=len(source) * 8 / us / 1e3,
        published_gbps=published_gbps,
        sha256=sha256,
        agrees=sha256 == digest,
    )


def receive(engine: tep.TransferEngine, file: File) -> Iterator[Any]:
    """Yield a descriptor; then for each round None, once it counts, and the result.

    A result is the time at which the count was reached, the number of immediates, and the digest of
    the memory.
    """
    target = np.zeros(file.npages * file.page_bytes, np.uint8)
    _, slots = file.places()
    yield engine.reg_mr(target)[1].to_bytes()
    for _ in range(file.rounds):
        target[:] = 0
        expected = engine.expect_imm_count(_IMM, file.npages)
        yield None
        expected.wait(_WAIT_S)
        arrived_s = engine.driver.now_s()
        beyond = dict(engine.stats().imms_unexpected).get(_IMM, 0)
        landed = target.reshape(file.npages, -1)[slots].reshape(-1)[: file.nbytes]
        yield arrived_s, file.npages + beyond, hashlib.sha256(landed.tobytes()).hexdigest()


@contextmanager
def remote(pair: Pair, file: File) -> Iterator[Iterator[Any]]:
    """Start a process that receives; give its answers, and end it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs, pair, file), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _answers(ours, f"the receiver of {pair.fabric}")
    finally:
        ours.close()
        process.join(10)
        process.kill()
        process.join()


def _answers(pipe: Connection, what: str) -> Iterator[Any]:
    """Yield what comes by a pipe; raise an error of the receiver here."""
    while True:
        try:
            if not pipe.poll(system_s(2 * _WAIT_S)):
                raise WaitTimeout(f"{what} did not answer within {2 * _WAIT_S:g} s")
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            raise FabricError(f"{what} has ended", code="UNREACHABLE") from error
        if isinstance(answer, BackendUnavailable):
            raise answer
        if isinstance(answer, TepError):
            raise FabricError(f"{what}: {type(answer).__name__}: {answer}") from answer
        yield answer


def _receive(pipe: Connection, pair: Pair, file: File) -> None:
    """Receive in a process of its own, until the sender closes its end of the pipe."""
    try:
        with tep.TransferEngine.open(pair.backend, name="demo-receiver", **pair.receiver) as engine:
            for answer in receive(engine, file):
                pipe.send(answer)
            pipe.recv()
    except TepError as error:
        pipe.send(error)
    except (EOFError, OSError):
        pass  # the sender has closed its end
