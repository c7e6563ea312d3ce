"""NIXL's agent on a tep engine: memory, metadata, descriptor lists, transfers, notifications.

The README beside this file lists the differences. Rule 1: the lock guards everything; a thread that
holds it calls no verb of the engine that waits for the engine's thread. Rule 2: a notification is
delivered when the immediates of its transfer are counted, in the order in which transfers ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Condition
from typing import Any, TypeVar

import numpy as np

from tep import BadDescriptor, Expectation, TepError, checksum
from tep.compat.engines import engine_of
from tep.compat.nixl import bindings as nixlBind
from tep.compat.nixl.bindings import DEFAULT_COMM_PORT, nixl_thread_sync_t
from tep.compat.nixl.channel import BODY_MAX, Channel, Channels
from tep.compat.nixl.listener import Listener
from tep.compat.nixl.registry import PLUGINS, Registry, raw_of, text_of
from tep.compat.nixl.transfers import Numbers, Request, Side, cut_rows
from tep.compat.nixl.wire import (
    Grant,
    Notif,
    Part,
    Remote,
    Sums,
    WantGrant,
    WantSums,
    Written,
    decode,
    encode,
)

__all__ = [
    "DEFAULT_COMM_PORT", "nixlBind", "nixl_agent", "nixl_agent_config", "nixl_backend_handle",
    "nixl_prepped_dlist_handle", "nixl_thread_sync_t", "nixl_xfer_handle",
]  # fmt: skip

logger = logging.getLogger("tep.compat.nixl")
_T = TypeVar("_T")
nixl_backend_handle = int

_BLOCK = 1 << 16
"""Number of immediates of one writer."""

_YES = {"1", "on", "true", "y", "yes"}

_CANCEL_S = 2.0
"""Time that the release of an active transfer waits for its end, seconds."""

_ASK_AGAIN_S = 1.0
"""Interval at which a polled transfer asks an agent again that does not answer, seconds."""

NOTIF_MAX = BODY_MAX - 64
"""Longest notification."""


class nixl_agent_config:
    """The configuration of an agent; see NIXL's own."""

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: list[str] = ["UCX"],
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t, not {sync_mode!r}")
        self.backends = backends
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode


class _Handle:
    """A number that stands for an object of an agent."""

    __slots__ = ("__weakref__", "_agent", "_handle", "_released")
    _agent: nixl_agent

    def __init__(self, agent: nixl_agent, value: int) -> None:
        self._handle, self._agent, self._released = int(value), agent, False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._handle:#x}, released={self._released})"


class nixl_prepped_dlist_handle(_Handle):
    """A prepared list of descriptors."""

    __slots__ = ()

    def release(self) -> None:
        """Forget the list. Idempotent."""
        self._released = True
        self._agent._lists.pop(self._handle, None)

    def __del__(self) -> None:
        if not self._released:
            self.release()


class nixl_xfer_handle(_Handle):
    """A transfer, which can be posted repeatedly."""

    __slots__ = ()

    def release(self) -> None:
        """Forget the transfer, after a cancel if it is active. Idempotent.

        Raises:
            nixlBackendError: it could not be cancelled in time; the handle stays.
        """
        if not self._released:
            self._agent._release(self._handle)
            self._released = True

    def __del__(self) -> None:
        if not self._released:
            self._agent._dropped.append(self._handle)  # a finaliser takes no lock


class nixl_agent(Registry):
    """An agent: one engine of tep, under NIXL's interface."""

    def __init__(
        self,
        agent_name: str,
        nixl_conf: nixl_agent_config | None = None,
        instantiate_all: bool = False,
    ) -> None:
        conf = nixl_conf or nixl_agent_config()
        usual = nixl_thread_sync_t(int(conf.enable_listen))  # STRICT, or NONE
        config = nixlBind.nixlAgentConfig(
            conf.enable_pthread,
            conf.enable_listen,
            conf.port,
            usual if conf.sync_mode is None else conf.sync_mode,
            conf.capture_telemetry,
        )
        self._open(nixlBind.nixlAgent(agent_name, config))
        for name in PLUGINS if instantiate_all and nixl_conf is None else conf.backends:
            if name in PLUGINS:
                self.create_backend(name)
            else:
                logger.warning("Skipping backend registration %s due to the missing plugin.", name)

    @classmethod
    def over(cls, agent: Any) -> nixl_agent:
        """Open the agent of a nixlAgent, without backends. Not part of NIXL's interface."""
        found = cls.__new__(cls)
        found._open(agent)
        return found

    def _open(self, agent: Any) -> None:
        self.agent, agent.front = agent, self
        self.notifs: dict[str, list[bytes]] = {}
        self.nixl_ops = {"WRITE": nixlBind.NIXL_WRITE, "READ": nixlBind.NIXL_READ}
        self._telemetry = _asked("NIXL_TELEMETRY_ENABLE", agent.config.captureTelemetry)
        self._checksums = _asked("TEP_NIXL_CHECKSUMS", False)
        self._turn: Callable[[], object] = os.sched_yield  # lets the engine's thread run
        self._nap_s = _ASK_AGAIN_S
        if os.environ.get("TEP_NIXL_BACKEND") == "chaos":
            from tep.compat.nixl.chaos import (
                nodes as simulated,  # the simulator, if it is asked for
            )

            nodes = simulated()
            engine, self._turn, self._nap_s = nodes.take(), nodes.turn, 0.0
        else:
            engine = engine_of("TEP_NIXL")
        self._now_s = engine.driver.now_s
        channels = Channels(engine, agent.name, self._on_message, self._on_lost)
        self._lost: dict[str, tuple[int, str]] = {}  # notifications to an agent, and why
        super().__init__(agent.name, engine, channels)
        self._numbers = itertools.count(1)
        self._lists: dict[int, Side] = {}
        self._requests: dict[int, Request] = {}
        self._dropped: deque[int] = deque()
        self._grants: dict[Channel, Grant] = {}  # given
        self._granted: dict[Channel, Numbers] = {}  # got
        self._ungranted: dict[Channel, list[Request]] = {}
        self._uncompared: dict[int, tuple[Request, list[int]]] = {}  # with the checksums here
        self._queues: dict[Channel, deque[list[Any]]] = {}  # [ready, what is done then]
        self._new: dict[str, list[bytes]] = {}
        self._news = Condition(self.lock)
        port = agent.config.listenPort if agent.config.useListenThread else None
        try:
            self._listener = Listener(port, self._called)
        except OSError as error:
            engine.close()
            raise nixlBind.nixlBackendError(f"listen_port={port}: {error}") from error

    def close(self) -> None:
        """Close the engine, which ends all open transfers. Not part of NIXL's interface."""
        self._listener.close()
        self.engine.close()

    @property
    def listen_port(self) -> int | None:
        """The port of the listener; None: there is none. Not part of NIXL's interface."""
        return self._listener.port

    def prep_xfer_dlist(
        self,
        agent_name: str | bytes,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: list[str] = [],
    ) -> nixl_prepped_dlist_handle:
        """Check a list of descriptors once, for many transfers of some of them."""
        self._check_backends(backends)
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("Please specify a mem type for strided descriptors")
            mem, rows = self.nixl_mems[mem_type], _unrolled(xfer_list)
        else:
            descs = self.get_xfer_descs(xfer_list, mem_type)
            if descs is None:
                raise TypeError(f"prep_xfer_dlist: {type(xfer_list).__name__} is no list of memory")
            mem, rows = descs.getType(), descs.rows()
        name = text_of(agent_name)
        remote = None if name in {"", "NIXL_INIT_AGENT"} else self._remote(name)
        return nixl_prepped_dlist_handle(self, self._add_list(self._side(remote, mem, rows)))

    def _add_list(self, side: Side) -> int:
        with self.lock:
            number = next(self._numbers)
            self._lists[number] = side
        return number

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    # ------------------------------------------------------------------ transfers

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: list[int] | np.ndarray,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: list[int] | np.ndarray,
        notif_msg: bytes = b"",
        backends: list[str] = [],
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """Make a transfer of some descriptors of two prepared lists."""
        op = self.nixl_ops[operation]
        self._check_backends(backends)
        picked = []
        for handle, indices in (
            (local_xfer_side, local_indices),
            (remote_xfer_side, remote_indices),
        ):
            side = self._lists.get(handle._handle)
            if side is None or (side.remote is None) != (handle is local_xfer_side):
                raise nixlBind.nixlInvalidParamError(f"{handle!r} is no list of this side")
            which = np.asarray(indices, np.int64)
            if (
                which.ndim != 1
                or not len(which)
                or which.min() < 0
                or which.max() >= len(side.rows)
            ):
                raise nixlBind.nixlInvalidParamError(
                    f"indices {which.ravel()[:8]} of a list of {len(side.rows)} descriptors"
                )
            picked.append(side.pick(which))
        _check_lengths(picked[0].rows, picked[1].rows)
        return self._request(op, picked[0], picked[1], notif_msg)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlBind.nixlXferDList,
        remote_descs: nixlBind.nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: bytes = b"",
        backends: list[str] = [],
    ) -> nixl_xfer_handle:
        """Make a transfer of two lists, element by element."""
        op = self.nixl_ops[operation]
        self._check_backends(backends)
        here, far = local_descs.rows(), remote_descs.rows()
        _check_lengths(here, far)
        remote = self._remote(remote_agent)
        local = self._side(None, local_descs.getType(), here)
        there = self._side(remote, remote_descs.getType(), far)
        return self._request(op, local, there, notif_msg)

    def _request(self, op: int, local: Side, there: Side, notif: bytes | str) -> nixl_xfer_handle:
        assert there.remote is not None
        with self.lock:
            self._check_messages(there.remote)
        raw = _checked(raw_of(notif))
        rows, over = cut_rows(local, there), self._news.notify_all
        request = Request(op, there.remote, rows, local.rows, raw, self._now_s, over)
        with self.lock:
            number = next(self._numbers)
            self._requests[number] = request
        return nixl_xfer_handle(self, number)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes = b"") -> str:
        """Post a transfer: "PROC", or "DONE" at once."""
        self._clean()
        with self.lock:
            request = self._found(handle)
            if request.state == "PROC":
                raise nixlBind.nixlRepostActiveError("the transfer is under way")
            if self.remotes.get(request.remote.name, request.remote) is not request.remote or (
                request.remote.name != self.name and request.remote.name not in self.remotes
            ):
                raise nixlBind.nixlRemoteDisconnectError(f"agent {request.remote.name!r} has left")
            self._check_messages(request.remote)
            if notif_msg:
                request.notif = _checked(raw_of(notif_msg))
            request.begin(next(self._numbers))
            self._try_post(request)
            request.posted_s = self._now_s()
            return self._state(request)

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """Return a posted transfer's state, "PROC" or "DONE"; raise if it failed, like NIXL."""
        with self.lock:
            request = self._found(handle)
            state = self._state(request)
            if state == "PROC" and self._now_s() - request.asked_s > _ASK_AGAIN_S:
                self._ask_again(request)  # the answer may have been lost
        if state == "PROC":
            self._turn()
        return state

    def wait(self, handle: nixl_xfer_handle, timeout: float = math.inf) -> str:
        """Sleep until a transfer is over; return what check_xfer_state says. Not NIXL's."""
        return self._sleep(lambda: self._result(handle), timeout) or "PROC"

    async def wait_async(self, handle: nixl_xfer_handle) -> str:
        """Do the same in a coroutine; `asyncio.timeout` limits it. Not NIXL's."""
        while (state := await asyncio.to_thread(self.wait, handle, _ASK_AGAIN_S)) == "PROC":
            pass  # a wait that is cancelled leaves its thread behind for this long at most
        return state

    def wait_notifs(self, timeout: float = math.inf) -> dict[str, list[bytes]]:
        """Sleep until there are notifications; return get_new_notifs(). Not NIXL's."""
        return self._sleep(self.get_new_notifs, timeout) or {}

    def _result(self, handle: nixl_xfer_handle) -> str:
        state = self.check_xfer_state(handle)
        return state if state != "PROC" else ""

    def _sleep(self, look: Callable[[], _T], timeout: float) -> _T:
        """Sleep until there is something to see, or the time is over."""
        end_s = self._now_s() + timeout
        with self._news:
            while not (found := look()) and (left_s := end_s - self._now_s()) > 0:
                self._news.wait(min(left_s, self._nap_s))
        return found

    @staticmethod
    def _state(request: Request) -> str:
        if request.state == "NEW":
            raise nixlBind.nixlNotPostedError("call transfer() first")
        if request.error is not None:
            kind, why = request.error
            raise kind(why)
        return request.state

    def _found(self, handle: nixl_xfer_handle) -> Request:
        found = self._requests.get(handle._handle)
        if found is None:
            raise nixlBind.nixlInvalidParamError(f"{handle!r} was released")
        return found

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlBind.nixlXferTelemetry:
        if not self._telemetry:
            raise nixlBind.nixlNoTelemetryError(
                "open the agent with capture_telemetry=True, or set NIXL_TELEMETRY_ENABLE=y"
            )
        with self.lock:
            request = self._found(handle)
            if request.state != "DONE":
                raise nixlBind.nixlNotPostedError(f"the transfer is {request.state}")
            return request.telemetry()

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        self._found(handle)
        return next(iter(self.backends))

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """Return "unknown", like NIXL's UCX."""
        self._found(req_handle)
        return 0, 0, "UNKNOWN"

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Forget a transfer; an active one is cancelled first, and waited for."""
        handle.release()

    def _release(self, number: int) -> None:
        with self.lock:
            request = self._requests.get(number)
            if request is None:
                return
            waits = self._cancel(request) if request.under_way else []
        end_s = self._now_s() + _CANCEL_S
        for one in waits:
            try:
                one.wait(max(0.0, end_s - self._now_s()))
            except TepError:
                continue  # its result does not matter
        with self.lock:
            if not all(one.finished for one in waits):
                raise nixlBind.nixlBackendError(
                    f"the transfer was not cancelled within {_CANCEL_S} s; memory is in use still"
                )
            del self._requests[number]

    def _clean(self) -> None:
        """Release handles that finalisers left, without waiting."""
        for _ in range(len(self._dropped)):
            number = self._dropped.popleft()
            with self.lock:
                request = self._requests.get(number)
                if request is not None and request.under_way:
                    self._cancel(request)
                    self._dropped.append(number)
                elif request is not None:
                    del self._requests[number]

    # ------------------------------------------------------------------ notifications

    def send_notif(
        self, remote_agent_name: str | bytes, notif_msg: bytes, backend: str | None = None
    ) -> None:
        """Notify an agent, after the transfers to it that have ended.

        Raises:
            nixlRemoteDisconnectError: the agent is lost, or earlier notifications are: the error
                says how many, and this one is not sent.
            nixlInvalidParamError: the notification is too long.
        """
        self._check_backends([] if backend is None else [backend])
        body = encode(Notif(_checked(raw_of(notif_msg))))
        with self.lock:
            remote = self._remote(remote_agent_name)
            self._check_messages(remote)
            self._channel(remote).send(body, on_lost=partial(self._note_lost, remote.name))

    def _note_lost(self, name: str, why: str) -> None:
        count, first = self._lost.get(name, (0, why))
        self._lost[name] = count + 1, first

    def _check_messages(self, remote: Remote) -> None:
        """Raise if messages to an agent were lost (once for each loss), or if it is lost itself."""
        count, why = self._lost.pop(remote.name, (0, ""))
        if count or self.channels.is_lost(self._channel(remote)):
            what = f"{count} earlier notification(s) are lost: {why}" if count else "it is lost"
            raise nixlBind.nixlRemoteDisconnectError(f"agent {remote.name!r}: {what}")

    def get_new_notifs(self, backends: list[str] = []) -> dict[str, list[bytes]]:
        self._check_backends(backends)
        self._clean()
        with self.lock:
            found, self._new = self._new, {}
        if not found:
            self._turn()
        return found

    def update_notifs(self, backends: list[str] = []) -> dict[str, list[bytes]]:
        """Return all notifications that were not taken yet, by agent."""
        for name, messages in self.get_new_notifs(backends).items():
            self.notifs.setdefault(name, []).extend(messages)
        return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str,
        lookup_tag: bytes,
        backends: list[str] = [],
        tag_is_prefix: bool = True,
    ) -> bool:
        """Take a notification; return whether there was one."""
        messages = self.update_notifs(backends).get(remote_agent_name, [])
        for message in messages:
            if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                messages.remove(message)
                return True
        return False

    def _queue(self, channel: Channel, then: Callable[[], object]) -> Callable[..., None]:
        """Queue what is done once all before it is; return the function that makes it ready."""
        line, entry = self._queues.setdefault(channel, deque()), [False, then]
        line.append(entry)

        def hand_out(*, notify: bool = True) -> None:
            entry[:] = True, then if notify else bool
            while line and line[0][0]:
                line.popleft()[1]()

        return hand_out

    def _hear(self, channel: Channel, notif: bytes | None) -> None:
        if notif is not None:
            self._new.setdefault(channel.name, []).append(notif)
            self._news.notify_all()

    def _forget(self, remote: Remote) -> None:
        why = f"agent {remote.name!r} was removed"
        for request in tuple(self._requests.values()):
            if request.remote is remote and request.state == "PROC":
                request.fail(nixlBind.nixlRemoteDisconnectError, why)
                self._cancel(request)

    # ------------------------------------------------------------------ under way

    def _try_post(self, request: Request) -> None:
        try:
            self._post(request)
        except (TepError, nixlBind.nixlBackendError) as error:
            request.under_way = False
            request.fail(nixlBind.nixlBackendError, str(error))

    def _post(self, request: Request) -> None:
        """Submit a request; writes wait until the target has granted immediates for them."""
        channel = self._channel(request.remote)
        request.asked_s = self._now_s()
        if request.op == nixlBind.NIXL_WRITE:
            granted = self._granted.get(channel)
            if granted is None:
                waiting = self._ungranted.setdefault(channel, [])
                waiting.append(request)
                if len(waiting) == 1:
                    self._want_grant(channel)
                return
            request.imm = granted.take()
            request.submit(self.engine, self.lock, lambda: self._written(request, granted, channel))
        else:
            request.submit(self.engine, self.lock, lambda: self._read(request, channel))

    def _want_grant(self, channel: Channel) -> None:
        channel.send(encode(WantGrant()), on_lost=lambda why: self._on_lost(channel, why))

    def _ask_again(self, request: Request) -> None:
        request.asked_s = self._now_s()
        channel = self._channel(request.remote)
        if request in self._ungranted.get(channel, ()):
            self._want_grant(channel)
        elif request.number in self._uncompared:
            self._want_sums(request, channel)

    def _written(self, request: Request, numbers: Numbers, channel: Channel) -> None:
        """Ask the target, once all rows are back, to count them and notify."""
        request.under_way = False
        imm, notif = request.imm, request.notif
        if request.error is not None:
            numbers.burnt.add(imm)
            return

        def lost(why: str) -> None:
            numbers.burnt.add(imm)  # its rows stay in the target's count
            if notif or self._checksums:
                self._notif_lost(request, why)

        told = None if self._checksums else notif or None
        if not notif and not self._checksums:
            request.end()
        ending = partial(request.end, request.number) if told else bool
        channel.send(encode(Written(imm, request.nrows, told)), ending, lost)
        if self._checksums:
            self._compare(request, channel)

    def _read(self, request: Request, channel: Channel) -> None:
        request.under_way = False
        if request.error is not None:
            return
        if self._checksums:
            self._compare(request, channel)
        else:
            self._notify(request, channel)

    def _notify(self, request: Request, channel: Channel) -> None:
        """End a request; if it has a notification, when the agent's engine has received it."""
        if request.notif:
            ending, lost = partial(request.end, request.number), partial(self._notif_lost, request)
            channel.send(encode(Notif(request.notif)), ending, lost)
        else:
            request.end()

    def _compare(self, request: Request, channel: Channel) -> None:
        """Compare the rows' checksums at both ends before a request ends."""
        try:
            self._uncompared[request.number] = request, request.checksums()
            self._want_sums(request, channel)
        except TepError as error:
            self._uncompared.pop(request.number, None)
            request.fail(nixlBind.nixlBackendError, f"checksums: {error}")

    def _want_sums(self, request: Request, channel: Channel) -> None:
        parts = [Part(one.region.key, one.length, one.there.tolist()) for one in request.parts]
        want = encode(WantSums(request.number, parts))
        channel.send(want, on_lost=lambda why: self._on_lost(channel, why))

    def _sums(self, message: WantSums) -> Sums:
        """Compute the checksums of rows here."""
        try:
            if not self._checksums:
                return Sums(message.number, [], "TEP_NIXL_CHECKSUMS is not set there")
            found = [
                checksum(self._regions[one.key][-1][1], one.offsets, one.nbytes)
                for one in message.parts
            ]
        except (TepError, LookupError) as error:
            return Sums(message.number, [], f"{type(error).__name__}: {error}")
        return Sums(message.number, found)

    def _on_sums(self, channel: Channel, there: Sums) -> None:
        """End a request whose checksums at the other end are known."""
        request, here = self._uncompared.get(there.number, (None, []))
        if request is None or self._channel(request.remote) is not channel:
            return
        del self._uncompared[there.number]
        if request.state != "PROC":
            return
        if there.why or len(there.values) != len(here):
            request.fail(
                nixlBind.nixlBackendError, f"agent {channel.name!r}: no checksums: {there.why}"
            )
        for part, mine, theirs in zip(request.parts, here, there.values):
            if mine != theirs:
                region = part.region
                request.fail(
                    nixlBind.nixlMismatchError,
                    f"agent {channel.name!r}: checksums differ: {len(part.there)} row(s) of "
                    f"{part.length} bytes in its {region.nbytes} bytes at {region.start:#x} of "
                    f"device {region.device}",
                )
        if request.error is None:
            self._notify(request, channel)

    def _notif_lost(self, request: Request, why: str) -> None:
        if request not in self._requests.values():  # its handle was released
            self._note_lost(request.remote.name, why)
        text = (
            f"agent {request.remote.name!r}: all bytes are there, its notification is lost: {why}"
        )
        request.fail(nixlBind.nixlRemoteDisconnectError, text)

    def _cancel(self, request: Request) -> list[Any]:
        """Cancel a request; return the handles to wait for."""
        waiting = self._ungranted.get(self._channel(request.remote), [])
        if request in waiting:
            waiting.remove(request)
            request.under_way = False
            request.fail(nixlBind.nixlCancelledError, "released before it was posted")
        for one in request.transfers:
            one.cancel()
        return list(request.transfers)

    # ------------------------------------------------------------------ messages

    def _on_message(self, channel: Channel, body: bytes) -> None:
        try:
            message = decode(body)
        except BadDescriptor:
            self.channels.garbled += 1
            return
        match message:
            case WantGrant():
                given = self._grants.get(channel)
                if given is None:
                    first = min(_BLOCK * len(self._grants), 1 << 32)
                    given = Grant(first, min(first + _BLOCK, 1 << 32))
                    self._grants[channel] = given
                channel.send(encode(given))
            case Grant():
                # A second answer must not bring burnt numbers back.
                self._granted.setdefault(channel, Numbers(message))
                for request in self._ungranted.pop(channel, []):
                    self._try_post(request)
            case Written():
                self._on_written(channel, message)
            case Notif():
                self._queue(channel, partial(self._hear, channel, message.notif))()
            case WantSums():
                self._queue(channel, lambda: channel.send(encode(self._sums(message))))()
            case Sums():
                self._on_sums(channel, message)
            case _:
                self.channels.garbled += 1

    def _on_written(self, channel: Channel, message: Written) -> None:
        """Notify once a transfer's immediates are counted; they must be granted to its writer."""
        given = self._grants.get(channel)
        if given is None or not given.start <= message.imm < given.stop:
            self.channels.garbled += 1
            return
        ready = self._queue(channel, partial(self._hear, channel, message.notif))

        def counted(expectation: Expectation) -> None:
            with self.lock:
                ready(notify=expectation.ok)
                if not expectation.ok:
                    logger.error("agent %r: no notification: %s", channel.name, expectation.error)

        self.engine.expect_imm_count(message.imm, message.count, on_done=counted)

    def _on_lost(self, channel: Channel, why: str) -> None:
        """Fail the requests that wait for an agent that is lost or gets no messages."""
        text = f"agent {channel.name!r} cannot be reached: {why}"
        failed = self._ungranted.pop(channel, [])
        for number, (request, _) in tuple(self._uncompared.items()):
            if self._channel(request.remote) is channel:
                failed.append(request)
                del self._uncompared[number]
        for request in failed:
            request.under_way = False
            request.fail(nixlBind.nixlRemoteDisconnectError, text)


def _asked(variable: str, otherwise: bool) -> bool:
    text = os.environ.get(variable, "").lower()
    return text in _YES if text else otherwise


def _check_lengths(here: nixlBind.Rows, there: nixlBind.Rows) -> None:
    if len(here) != len(there) or not len(here):
        raise nixlBind.nixlInvalidParamError(f"{len(here)} descriptors here, {len(there)} there")
    if (here[:, 1] != there[:, 1]).any():
        at = int(np.argmax(here[:, 1] != there[:, 1]))
        raise nixlBind.nixlInvalidParamError(f"the lengths of descriptor {at} differ")


def _checked(notif: bytes) -> bytes:
    if len(notif) > NOTIF_MAX:
        raise nixlBind.nixlInvalidParamError(
            f"a notification of {len(notif)} bytes; {NOTIF_MAX} are possible"
        )
    return notif


def _unrolled(strided: np.ndarray) -> nixlBind.Rows:
    """Unroll rows of (address, length, device, stride, count) to descriptors, one a block."""
    rows = strided.astype(np.int64)
    counts = rows[:, 4]
    which = np.repeat(np.arange(len(rows)), counts)
    steps = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = rows[which, 0] + steps * rows[which, 3]
    return np.stack([starts, rows[which, 1], rows[which, 2]], 1)
