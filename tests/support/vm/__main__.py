"""`scripts/rxe COMMAND`: run a command beside software RDMA NICs, in a small virtual machine.

Soft-RoCE (rdma_rxe) is a kernel module; few test machines can load one. A guest can: qemu's
emulation boots Debian's stock kernel in some seconds, without KVM and without root's help, and the
guest sees this machine's own files, so the same Python, checkout and libibverbs run in it.
"""

from __future__ import annotations

import argparse
import sys

from tests.support.vm.guest import Options, run_in_guest, show_on_stdout
from tests.support.vm.kernel import GuestError, cache_folder, fetch, install
from tests.support.vm.pair import Cables, show_both, two_guests


def main(argv: list[str]) -> int:
    """Parse, boot, run; the exit status is the command's, or 2 if there is no guest to be had."""
    parser = argparse.ArgumentParser(
        prog="scripts/rxe",
        description="Run a command in a small virtual machine with Soft-RoCE NICs rxe0, rxe1, ... "
        "It sees this machine's files; what it writes is lost, except for its output.",
    )
    parser.add_argument("--nics", type=int, default=8, help="NICs, 1 to 32 (default 8)")
    parser.add_argument("--mtu", type=int, default=4200, help="of their network (default 4200)")
    parser.add_argument("--memory", default="1G", help="of the machine (default 1G)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds (default 600)")
    parser.add_argument(
        "--two",
        nargs=2,
        metavar=("COMMAND0", "COMMAND1"),
        help="what two machines run, in a shell, with a cable for each NIC between them",
    )
    parser.add_argument("--install", action="store_true", help="apt-get what is missing, as root")
    parser.add_argument("--shell", action="store_true", help="give the command this terminal")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    given = parser.parse_args(argv)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if given.install:
        return _install()
    if given.two:
        return _two(given.two, given)
    if not command:
        if not given.shell:
            parser.error("no command; scripts/rxe --shell gives a shell")
        command = ["/bin/sh", "-i"]
    options = Options(
        nics=given.nics,
        mtu=given.mtu,
        memory=given.memory,
        timeout_s=given.timeout,
        interactive=given.shell,
    )
    try:
        found = run_in_guest(command, options, show=show_on_stdout)
    except GuestError as error:
        sys.stderr.write(f"rxe: {error}\n")
        return 2
    if found.status and found.kept is not None:
        sys.stderr.write(f"rxe: status {found.status}; logs are in {found.kept}\n")
    return found.status


def _two(commands: list[str], given: argparse.Namespace) -> int:
    wires = Cables(nics=given.nics, mtu=given.mtu, memory=given.memory)
    try:
        with two_guests(commands, wires) as guests:
            statuses = show_both(guests, given.timeout)
    except GuestError as error:
        sys.stderr.write(f"rxe: {error}\n")
        return 2
    return max(statuses)


def _install() -> int:
    try:
        install()
        fetch(cache_folder() / "kernel")
    except GuestError as error:
        sys.stderr.write(f"rxe: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
