"""Two hosts on one machine: network namespaces with a cable (veth) between them. Not a test.

Each host is a network namespace that a waiting process holds open; both have the files of this
machine. Only root may make them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Host", "NoNamespaces", "two_hosts"]

_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_CABLE = "wire0"


class NoNamespaces(LookupError):
    """This machine cannot make network namespaces; the message says why."""


class Host(NamedTuple):
    """One of the two: its address, and the process that holds its namespace."""

    address: str
    pid: int

    def inside(self, *command: str) -> list[str]:
        """The command line that runs a command on this host."""
        return ["nsenter", "-t", str(self.pid), "-n", *command]

    def sent_bytes(self) -> int:
        """Count the bytes that have left this host through the cable."""
        for line in _run(self.inside("cat", "/proc/net/dev")).splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == _CABLE:
                return int(numbers.split()[8])
        raise AssertionError(f"{self} has lost its cable")


def _run(command: list[str]) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if ran.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {ran.stderr.strip() or ran.returncode}")
    return ran.stdout


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make both; they are gone at the end, with all that was opened in them.

    Raises:
        NoNamespaces: they cannot be made here.
    """
    if missing := [name for name in ("ip", "nsenter", "unshare") if not shutil.which(name)]:
        raise NoNamespaces(f"not installed: {', '.join(missing)} (iproute2, util-linux)")
    if os.geteuid():
        raise NoNamespaces("only root may make network namespaces")
    with contextlib.ExitStack() as stack:
        hosts = []
        for address in _ADDRESSES:
            holder = stack.enter_context(_holder())
            hosts.append(Host(address, holder.pid))
        first, second = hosts
        _run(
            first.inside(
                *f"ip link add {_CABLE} type veth peer name {_CABLE} netns {second.pid}".split()
            )
        )
        for host in hosts:
            _run(host.inside(*f"ip address add {host.address}/24 dev {_CABLE}".split()))
            for link in ("lo", _CABLE):
                _run(host.inside("ip", "link", "set", link, "up"))
        yield first, second


@contextlib.contextmanager
def _holder() -> Iterator[subprocess.Popen[str]]:
    """A process in a namespace of its own, which ends when its input is closed."""
    command = ["unshare", "--net", "sh", "-c", "echo here; read line"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        if process.stdout.readline() != "here\n":
            raise NoNamespaces(f"unshare --net: {process.stderr.read().strip()}")
        try:
            yield process
        finally:
            process.stdin.close()
