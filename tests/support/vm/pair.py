"""Two guests, two kernels: NIC k of one has a virtual cable to NIC k of the other.

A cable is a stream between the two emulators: nothing of it is lost but what a guest's netem drops,
and a guest that is switched off is silent. The guests share this machine's files, read-only, and
nothing else: no memory, no process ids, no clock.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tests.support.vm.guest import boot_files, qemu_command, write_job
from tests.support.vm.image import cable_address, cables
from tests.support.vm.kernel import GuestError

__all__ = ["Cables", "Guest", "hosts_of", "show_both", "two_guests"]

_LOOK_S: Final = 0.1
_LISTENS_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cables:
    """The network between two guests.

    Attributes:
        nics: cables.
        mtu: of all; 4200 holds the largest packet of RDMA.
        ipv6: whether there is no IPv4 on them.
        own_name: each guest's own name is 127.0.1.1 to itself, as Debian's installer has it.
        netem: what `tc netem` does to all that is sent, at both ends; "" = nothing.
        memory: of each guest.
    """

    nics: int = 2
    mtu: int = 4200
    ipv6: bool = False
    own_name: bool = False
    netem: str = ""
    memory: str = "1G"


def hosts_of(me: int, wires: Cables) -> str:
    """/etc/hosts of a guest."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    for node, letter in enumerate("ab"):
        address = cable_address(node, 0, ipv6=wires.ipv6).partition("/")[0]
        lines.append(f"{'127.0.1.1' if wires.own_name and node == me else address} node{letter}")
    return "".join(f"{line}\n" for line in lines)


class Guest:
    """One running guest.

    Args:
        command: what qemu is started with.
        out: folder that it shares with us.
        console: file of what its kernel says.
    """

    def __init__(self, command: Sequence[str], out: Path, console: Path) -> None:
        self._out, self._console = out, console
        serial = ["-serial", f"file:{console}"]
        self._qemu = subprocess.Popen(
            [*command, *serial], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    @property
    def output(self) -> str:
        """What its command has printed so far."""
        return _text(self._out / "log")

    @property
    def told(self) -> str:
        """Output and console, for messages."""
        return f"{self.output[-4000:]}\n--- console\n{_text(self._console)[-1500:]}"

    def wait_for(self, text: str, timeout_s: float, *, times: int = 1) -> None:
        """Wait until the command has printed something, so often.

        Raises:
            GuestError: it has not, in time, or has ended.
        """
        end_s = time.monotonic() + timeout_s
        while self.output.count(text) < times:
            going = self.is_on(_LOOK_S) and time.monotonic() < end_s
            if not going and self.output.count(text) < times:
                raise GuestError(f"no {text!r} from the guest: {self.told}")

    def is_on(self, timeout_s: float) -> bool:
        """Whether it is still on after so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._qemu.wait(timeout_s)
        return self._qemu.poll() is None

    def ended(self, timeout_s: float) -> int:
        """Wait until the command has ended; return its status.

        Raises:
            GuestError: it has not, in time, or the machine ended without a status.
        """
        try:
            self._qemu.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise GuestError(f"not ended within {timeout_s} s: {self.told}") from error
        status = _text(self._out / "status").strip()
        if not status:
            raise GuestError(f"ended without a status: {self.last_words()} {self.told}")
        return int(status)

    def last_words(self) -> str:
        """What qemu itself has said, if it has ended; it says nothing more."""
        assert self._qemu.stderr is not None
        if self._qemu.poll() is None:
            return ""
        return self._qemu.stderr.read().decode(errors="replace")[-500:]

    def stall(self, seconds: float) -> None:
        """Stop the machine as a busy host does, its clock with it, and let it go on."""
        self._qemu.send_signal(signal.SIGSTOP)
        try:
            self.is_on(seconds)
        finally:
            self._qemu.send_signal(signal.SIGCONT)

    def switch_off(self) -> None:
        """Pull the plug: the machine says nothing any more. Idempotent."""
        self._qemu.kill()
        self._qemu.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.switch_off()
        assert self._qemu.stderr is not None
        self._qemu.stderr.close()


def show_both(guests: Sequence[Guest], timeout_s: float) -> list[int]:
    """Print what both print, line by line, until both have ended; return their statuses.

    Raises:
        GuestError: one has not ended in time, or without a status.
    """
    end_s = time.monotonic() + timeout_s
    shown = [0] * len(guests)
    while True:
        running = [guest.is_on(_LOOK_S) for guest in guests]
        for k, guest in enumerate(guests):
            text = guest.output
            if running[k]:
                text = text[: text.rfind("\n") + 1]  # the rest of a line comes later
            lines = text.splitlines()[shown[k] :]
            shown[k] += len(lines)
            sys.stdout.write("".join(f"{k}: {line}\n" for line in lines))
        sys.stdout.flush()
        if not any(running) or time.monotonic() > end_s:
            return [guest.ended(0) for guest in guests]


@contextlib.contextmanager
def two_guests(commands: Sequence[str], wires: Cables = Cables()) -> Iterator[tuple[Guest, Guest]]:
    """Boot two guests, each with a shell command in this folder; both are off at the end.

    Raises:
        GuestError: a tool or the kernel cannot be had; says which, and what would bring it.
    """
    with tempfile.TemporaryDirectory(prefix="tep-guests-") as folder, contextlib.ExitStack() as on:
        scratch = Path(folder)
        kernel, initramfs = boot_files(scratch)
        guests = []
        for me, text in enumerate(commands):
            out = scratch / f"out{me}"
            out.mkdir()
            setup, ip_batch, rdma_batch = cables(
                me, wires.nics, wires.mtu, ipv6=wires.ipv6, hosts=hosts_of(me, wires)
            )
            if wires.netem:
                shape = f"tc qdisc add dev nic{{}} root netem {wires.netem}\n"
                setup += "".join(map(shape.format, range(wires.nics)))
            write_job(out, ["/bin/sh", "-c", text], (setup, ip_batch, rdma_batch))
            command = qemu_command(kernel, initramfs, out, wires.memory)
            for k in range(wires.nics):
                end = f"addr.type=unix,addr.path={scratch}/cable{k}"
                mac = f"mac=02:00:00:00:{k:02x}:{me + 1:02x}"
                command += ["-netdev", f"stream,id=n{k},server={'off' if me else 'on'},{end}"]
                command += ["-device", f"virtio-net-pci,netdev=n{k},{mac},host_mtu={wires.mtu}"]
            guests.append(on.enter_context(Guest(command, out, scratch / f"console{me}")))
            _wait_for_ends([scratch / f"cable{k}" for k in range(wires.nics)], guests[0])
        yield guests[0], guests[1]


def _wait_for_ends(ends: Sequence[Path], guest: Guest) -> None:
    end_s = time.monotonic() + _LISTENS_S
    while not all(end.exists() for end in ends):
        if not guest.is_on(_LOOK_S / 10) or time.monotonic() > end_s:
            raise GuestError(f"qemu makes no cables: {guest.last_words()} {guest.told}")


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
