"""Introspection of running engines: a process's report of what they wait for, and its readers.

A process with a thread driver has one more thread, which sleeps on a UNIX socket until a client
connects. It reports even while the thread that steps an engine hangs, and it only reads.

Rule 1: the socket lies in the user's private folder, which nobody else may open. Rule 2: one
client at a time, bounded in time and number, so that none can delay an engine.
Rule 3: nothing here raises into an engine; errors are logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from tep.base.errors import UsageError
from tep.base.waiting import system_s
from tep.host.folders import make_own, unsafe, usual_folders

__all__ = ["SWITCH", "Found", "Seen", "ask", "find", "hide", "show"]

SWITCH: Final = "TEP_SIGHT"
"""The environment variable: "off", or the folder for the sockets in place of the usual one."""

_log = logging.getLogger("tep")

_CLIENT_S: Final = 1.0
"""Time limit for a client to read the report, seconds."""

_PAUSE_S: Final = 0.02
"""Pause between two answers, seconds: a client that asks without end takes little of the CPU."""

_ANSWER_MAX: Final = 16 << 20
_FRAMES_MAX: Final = 40
_TRIES: Final = 5
_JOIN_S: Final = 0.5
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred { pid_t pid; uid_t uid; gid_t gid; };


@runtime_checkable
class Seen(Protocol):
    """The interface of an object that can be looked at: an engine."""

    name: str

    def stall_report(self) -> str:
        """Report what each open handle waits for."""


class _Here:
    """The engines that this process shows, by id, and the thread that answers while there is one.

    The lock guards `thread` and `listener`; `seen` needs none.
    """

    lock = threading.Lock()
    seen: Final[dict[int, weakref.ref[Seen]]] = {}
    thread: threading.Thread | None = None
    listener: _Listener | None = None


def show(machine: object) -> None:
    """Make this process answer questions about an engine, until hide() or its end."""
    if not isinstance(machine, Seen) or os.environ.get(SWITCH) == "off":
        return
    key = id(machine)

    def gone(_: object) -> None:  # called by the collector, on any thread, with any lock held
        _Here.seen.pop(key, None)
        _ring()

    _Here.seen[key] = weakref.ref(machine, gone)
    with _Here.lock:
        if _Here.thread is not None:
            return
        try:
            _start()
        except (OSError, RuntimeError, UsageError) as error:
            level = logging.WARNING if SWITCH in os.environ else logging.INFO
            _log.log(level, "tep stall cannot see this process: %s", error)


def hide(machine: object) -> None:
    """Stop answering about an engine; the thread ends with the last one."""
    if machine is None or _Here.seen.pop(id(machine), None) is None:
        return
    thread = _Here.thread
    _ring()
    if not _Here.seen and thread is not None and thread is not threading.current_thread():
        thread.join(_JOIN_S)  # so that its descriptors are closed; it may be answering


def _ring() -> None:
    if not _Here.seen and (listener := _Here.listener) is not None:
        with contextlib.suppress(OSError):
            os.eventfd_write(listener.bell, 1)


def _forked() -> None:
    """Forget engines and thread in the child of a fork: they are the parent's."""
    _Here.lock = threading.Lock()
    _Here.seen.clear()
    listener, _Here.thread, _Here.listener = _Here.listener, None, None
    if listener is not None:
        os.close(listener.bell)
        listener.socket.close()  # else the child would take its parent's connections


os.register_at_fork(after_in_child=_forked)


# ---------------------------------------------------------------------- answering


class _Listener:
    """The listening socket of this process, its path, and an eventfd that wakes the thread."""

    def __init__(self) -> None:
        given = os.environ.get(SWITCH)
        folder = Path(given) if given else next(usual_folders(os.geteuid()))
        make_own(folder, f"name a folder of your own with mode 700 by {SWITCH}=FOLDER")
        with contextlib.suppress(OSError):
            _sweep(folder)
        # The number in the name keeps processes apart that have the same id, e.g. in containers.
        self.path = folder / f"{os.getpid()}.{os.urandom(4).hex()}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.bell = -1
        try:
            self.socket.setblocking(False)
            self.socket.bind(os.fspath(self.path))
            self.socket.listen(16)
            self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            self.close()
            raise UsageError(f"{self.path}: {error}") from error

    def close(self) -> None:
        self.socket.close()
        if self.bell >= 0:
            os.close(self.bell)
        with contextlib.suppress(OSError):
            self.path.unlink()


def _start() -> None:
    listener = _Listener()
    thread = threading.Thread(target=_serve, args=(listener,), name="tep-sight", daemon=True)
    _Here.listener, _Here.thread = listener, thread
    # At the exit of the process; before that, the thread does it.
    weakref.finalize(listener, _unlink, listener.path, os.getpid())
    try:
        thread.start()
    except RuntimeError:
        _Here.listener = _Here.thread = None
        listener.close()
        raise


def _unlink(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # and not in a child
        with contextlib.suppress(OSError):
            path.unlink()


def _serve(listener: _Listener) -> None:
    """Answer, on the thread, until there is no engine any more."""
    bell, poller, quiet = listener.bell, select.poll(), select.poll()
    for each in (poller, quiet):
        each.register(bell, select.POLLIN)
    poller.register(listener.socket, select.POLLIN)
    while True:
        ready = dict(poller.poll())
        if bell in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(bell)
            with _Here.lock:
                if not _Here.seen:
                    _Here.listener = _Here.thread = None
                    listener.close()
                    return
        if len(ready) > (bell in ready):
            try:
                _answer_one(listener.socket)
            except Exception as error:  # noqa: BLE001  # no client ends the thread
                _log.debug("a client of this process was not answered: %s", error)
            quiet.poll(_PAUSE_S * 1000)


def _answer_one(listener: socket.socket) -> None:
    client, _ = listener.accept()
    with client:
        if _user_of(client) not in {0, os.geteuid()}:
            return
        client.settimeout(_CLIENT_S)
        client.sendall(json.dumps(_answer()).encode())


def _answer() -> dict[str, object]:
    engines = [engine for ref in list(_Here.seen.values()) if (engine := ref()) is not None]
    return {
        "pid": os.getpid(),
        "command": " ".join(sys.orig_argv)[:400],
        "engines": [
            {"name": engine.name, "report": _again(engine.stall_report)} for engine in engines
        ],
        "threads": _stacks(),
    }


def _again(read: Callable[[], str]) -> str:
    """Read something that another thread may change: if a dict grows meanwhile, read it again."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(RuntimeError, KeyError, IndexError):
            return read()
    return read()


def _stacks() -> list[dict[str, object]]:
    """List the call stack of each thread, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        {
            "name": names.get(ident, f"thread {ident}"),
            "stack": [
                f"{at.name} ({at.filename}:{at.lineno})"
                for at in traceback.extract_stack(frame)[-_FRAMES_MAX:]
            ],
        }
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]


def _sockets(folder: Path) -> Iterator[tuple[int, Path]]:
    """List the sockets in a folder, with their processes' ids."""
    for path in folder.iterdir():
        number = path.name.partition(".")[0]
        if number.isdecimal() and path.is_socket():
            yield int(number), path


def _sweep(folder: Path) -> None:
    """Remove the sockets of killed processes, without disturbing others."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asked:
        for _, path in list(_sockets(folder)):
            with contextlib.suppress(OSError):  # a socket in use is of another type
                try:
                    asked.connect(os.fspath(path))
                except ConnectionRefusedError:  # no process has it open any more
                    path.unlink()


def _user_of(connected: socket.socket) -> int:
    """Return the user at the other end."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


# ---------------------------------------------------------------------- asking


class Found(NamedTuple):
    """A process that can be asked, by its socket."""

    pid: int
    path: Path
    uid: int


def find(pid: int | None = None) -> list[Found]:
    """Find the processes of this user with engines, or the named one; sorted by id.

    Root finds the named process of any user.
    """
    uid = os.geteuid()
    if pid is not None and uid == 0:
        with contextlib.suppress(OSError):
            uid = Path(f"/proc/{pid}").stat().st_uid
    given = os.environ.get(SWITCH)
    folders = usual_folders(uid) if given in {None, "", "off"} else iter([Path(f"{given}")])
    found = []
    for folder in folders:
        if unsafe(folder, uid) is not None:
            continue
        found += [Found(one, path, uid) for one, path in _sockets(folder) if pid in {None, one}]
    return sorted(found)


def ask(process: Found, timeout_s: float = 5.0) -> dict[str, Any] | None:
    """Ask a process for its report; None: it has ended, and its files are removed.

    Raises:
        TimeoutError: it does not answer in time.
        OSError: it cannot be asked.
    """
    end_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.settimeout(system_s(timeout_s))
        try:
            asked.connect(os.fspath(process.path))
        except FileNotFoundError:
            return None
        except ConnectionRefusedError:  # no process has it open any more
            with contextlib.suppress(OSError):
                process.path.unlink()
            return None
        if _user_of(asked) != process.uid:
            raise PermissionError(f"{process.path} is served by another user")
        parts: list[bytes] = []
        try:
            while sum(map(len, parts)) < _ANSWER_MAX:
                asked.settimeout(system_s(max(0.001, end_s - time.monotonic())))
                parts.append(asked.recv(1 << 16))
                if not parts[-1]:
                    break
        except (ConnectionResetError, BrokenPipeError):
            return None
    try:
        answer = json.loads(b"".join(parts))
    except ValueError:
        return None  # the process ended in the middle
    return answer if isinstance(answer, dict) else None
