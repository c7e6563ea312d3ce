"""The demo between two processes: this one sends, one that it starts receives; over any backend.

PAIRS is the table of such runs. The two exchange lines of JSON over the receiver's standard input
and output; the file itself goes by one-sided writes alone. The receiver ends when its input does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import queue
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

import tep
from tep.backends import BACKENDS
from tep.base.errors import BackendUnavailable, FabricError, TepError, WaitTimeout
from tep.base.waiting import system_s
from tep.cli.demo_moved import LeftOut, Moved, count_overtakes

__all__ = ["PAIRS", "Pair", "main", "move_between", "page_places"]

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

_IMM: Final = 42
_WARM_IMM: Final = 43
_FIRST_OF_MANY: Final = 1 << 16
_WAIT_S: Final = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
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


def page_places(npages: int, seed: int) -> tuple[I64, I64]:
    """Return the order in which pages are sent, and the slot of each page at the receiver."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(npages)
    return rng.permutation(npages), slots


def move_between(
    pair: Pair, data: U8, page_bytes: int, *, seed: int, rounds: int = 3
) -> Moved | LeftOut:
    """Move `data` from this process to another one as pages in random order, several times.

    Args:
        pair: the backend and its options.
        data: uint8[n], n >= 1; the last page is filled up with zeros.
        page_bytes: length of a page.
        seed: seed of the page order on both sides.
        rounds: number of rounds; the receiver's memory is wiped before each.

    Returns:
        The record of the run; or the reason why this machine cannot make it.

    Raises:
        FabricError: it began, and failed.
    """
    try:
        sender = tep.TransferEngine.open(pair.backend, name="demo-sender", **pair.sender)
    except BackendUnavailable as error:
        return _left_out(pair, error)
    with sender:
        npages = -(-len(data) // page_bytes)
        source = np.zeros(npages * page_bytes, np.uint8)
        source[: len(data)] = data
        want = {"nbytes": len(data), "npages": npages, "page_bytes": page_bytes, "seed": seed}
        try:
            with _Receiver(pair) as receiver:
                there = receiver.ask("open", backend=pair.backend, options=dict(pair.receiver))
                desc = tep.MrDesc.from_bytes(bytes.fromhex(receiver.ask("reg", **want)))
                run = _Sending(sender, source, desc, receiver, page_bytes, seed)
                return run.measure(pair, data, rounds, there)
        except BackendUnavailable as error:
            return _left_out(pair, error)


def _left_out(pair: Pair, error: BackendUnavailable) -> LeftOut:
    why = str(error).splitlines()[0]
    return LeftOut(pair.fabric, why, tuple(error.tried), BACKENDS[pair.backend].cure)


class _Sending:
    """The sender's side: the file in registered memory, and the places of its pages."""

    def __init__(
        self,
        engine: tep.TransferEngine,
        source: U8,
        desc: tep.MrDesc,
        receiver: _Receiver,
        page_bytes: int,
        seed: int,
    ) -> None:
        self.engine = engine
        self.nbytes = len(source)
        self.npages = len(source) // page_bytes
        self.page_bytes = page_bytes
        self.receiver = receiver
        self.desc = desc
        order, slots = page_places(self.npages, seed)
        mr, _ = engine.reg_mr(source, access=tep.Access.SOURCE)
        self.src, self.dst = (mr, tep.Pages(order)), (desc, tep.Pages(slots[order]))
        self.sent_bytes: tuple[int, ...] = ()

    def measure(self, pair: Pair, data: U8, rounds: int, nics: int) -> Moved:
        """Run all rounds, then check the order of arrival; return one record."""
        # The first row to a peer waits for a handshake, which is no part of the transfer.
        self.engine.submit_barrier([self.desc], _WARM_IMM).wait(_WAIT_S)
        digest = hashlib.sha256(data.tobytes()).hexdigest()
        found = [self.round() for _ in range(rounds)]
        wrong = [one for one in found if one["counted"] != self.npages or one["sha256"] != digest]
        shown = wrong[0] if wrong else found[-1]
        took_s = statistics.median(one["took_s"] for one in found)
        return Moved(
            fabric=pair.fabric,
            processes=2,
            pages=self.npages,
            nics=f"{len(self.engine.main_address.domains)} -> {nics}",
            nic_bytes=self.sent_bytes,
            imms_expected=self.npages,
            imms_counted=shown["counted"],
            overtakes=self.overtakes(),
            real_us=took_s * 1e6,
            gbytes_per_s=self.nbytes / took_s / 1e9,
            sha256=shown["sha256"],
            agrees=shown["sha256"] == digest,
        )

    def round(self) -> dict[str, Any]:
        """Send all pages with one immediate; return the receiver's check and the duration."""
        self.receiver.ask("expect", imm=_IMM)
        self.receiver.say("arrived")
        # Both processes read one clock: CLOCK_MONOTONIC is the machine's.
        start_s = time.monotonic()
        sent = self.engine.submit_paged_writes(self.page_bytes, self.src, self.dst, imm=_IMM)
        at_s = self.receiver.hear("arrived")
        sent.wait(_WAIT_S)
        self.sent_bytes = tuple(nic.nbytes for nic in sent.stats().nics)
        return {**self.receiver.ask("check"), "took_s": at_s - start_s}

    def overtakes(self) -> int:
        """Send the pages again, each with its own number; count the overtakes."""
        self.receiver.ask("number")
        imms = np.arange(_FIRST_OF_MANY, _FIRST_OF_MANY + self.npages)
        sent = self.engine.submit_paged_writes(self.page_bytes, self.src, self.dst, imm=imms)
        sent.wait(_WAIT_S)
        return int(self.receiver.ask("overtakes"))


class _Receiver:
    """The receiving process, as seen from the sender."""

    def __init__(self, pair: Pair) -> None:
        self._what = f"the receiver of {pair.fabric}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tep.cli.demo_pair import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._pending = b""

    def ask(self, do: str, **arguments: object) -> Any:
        """Send a request and return the answer; raise an error of the receiver here."""
        self.say(do, **arguments)
        return self.hear(do)

    def say(self, do: str, **arguments: object) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        except BrokenPipeError as error:
            raise FabricError(f"{self._what} has ended", code="UNREACHABLE") from error

    def hear(self, do: str) -> Any:
        """Wait for the line that answers."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        deadline_s = time.monotonic() + 2 * _WAIT_S
        while b"\n" not in self._pending:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([fd], [], [], system_s(left_s))[0]:
                raise WaitTimeout(f"{self._what} did not answer {do!r} within {2 * _WAIT_S:g} s")
            more = os.read(fd, 65536)
            if not more:
                raise FabricError(f"{self._what} ended before {do!r}", code="UNREACHABLE")
            self._pending += more
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if "ok" in answer:
            return answer["ok"]
        text = f"{self._what}: {answer['error']}: {answer['text']}"
        if answer["error"] == "BackendUnavailable":
            raise BackendUnavailable(text, tuple(tuple(step) for step in answer["tried"]))
        raise FabricError(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class _Receiving:
    """The receiver's side; each method answers a line of its name."""

    engine: tep.TransferEngine | None = None

    def open(self, backend: str, options: dict[str, Any]) -> int:
        """Open the engine; return the number of its NICs."""
        self.engine = tep.TransferEngine.open(backend, name="demo-receiver", **options)
        return len(self.engine.main_address.domains)

    def reg(self, nbytes: int, npages: int, page_bytes: int, seed: int) -> str:
        """Register memory for the file; return its descriptor."""
        assert self.engine is not None
        self.nbytes, self.shape = nbytes, (npages, page_bytes)
        _, self.slots = page_places(npages, seed)
        self.target = np.zeros(npages * page_bytes, np.uint8)
        _, desc = self.engine.reg_mr(self.target)
        return desc.to_bytes().hex()

    def expect(self, imm: int) -> None:
        """Wipe the memory, and begin to count."""
        assert self.engine is not None
        self.target[:] = 0
        self.expected = self.engine.expect_imm_count(imm, self.shape[0])

    def arrived(self) -> float:
        """Wait for the count; return the time at which it was reached, by the machine's clock."""
        self.expected.wait(_WAIT_S)
        return time.monotonic()

    def check(self) -> dict[str, object]:
        """Return the digest of the memory, and the number of immediates."""
        assert self.engine is not None
        landed = self.target.reshape(self.shape)[self.slots].reshape(-1)[: self.nbytes]
        return {
            # The immediates that the expectation took, and those beyond it. The engine's total
            # would include the warm-up's immediate too.
            "counted": self.expected.count + dict(self.engine.stats().imms_unexpected).get(_IMM, 0),
            "sha256": hashlib.sha256(landed.tobytes()).hexdigest(),
        }

    def number(self) -> None:
        """Record from now on the order in which the pages' own numbers come."""
        assert self.engine is not None
        self.came: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        numbers = range(_FIRST_OF_MANY, _FIRST_OF_MANY + self.shape[0])
        self.engine.on_imm(numbers, lambda imm, count: self.came.put((imm, count)))

    def overtakes(self) -> int:
        """Wait for all of them; return the number that came before an earlier one."""
        numbers: list[int] = []
        while len(numbers) < self.shape[0]:
            try:
                imm, count = self.came.get(timeout=_WAIT_S)
            except queue.Empty:
                raise WaitTimeout(
                    f"{len(numbers)} of {self.shape[0]} numbered immediates within {_WAIT_S:g} s"
                ) from None
            numbers += [imm] * count
        return count_overtakes(numbers)


def main() -> None:
    """Run the receiver: answer lines until there are no more."""
    receiving = _Receiving()
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, object]
        try:
            answer = {"ok": getattr(receiving, request.pop("do"))(**request)}
        except TepError as error:
            tried = error.tried if isinstance(error, BackendUnavailable) else ()
            answer = {"error": type(error).__name__, "text": str(error), "tried": list(tried)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    if receiving.engine is not None:
        receiving.engine.close()
