"""NIXL's agent of C++, `nixl._bindings.nixlAgent`: the calls below nixl_agent, over nixl_agent.

Handles and backends are numbers here, and answers are statuses; errors are raised.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tep.compat.nixl import bindings as nixlBind
from tep.compat.nixl.api import nixl_agent
from tep.compat.nixl.bindings import nixl_status_t
from tep.compat.nixl.registry import MEMS, PARAMS, PLUGINS, raw_of, text_of

__all__ = ["nixlAgent"]

_OPS: Final = {nixlBind.NIXL_READ: "READ", nixlBind.NIXL_WRITE: "WRITE"}


def _done(_result: object) -> nixl_status_t:
    return nixl_status_t.NIXL_SUCCESS


def _state(word: str) -> nixl_status_t:
    return nixl_status_t.NIXL_SUCCESS if word == "DONE" else nixl_status_t.NIXL_IN_PROG


def _known(yes: bool) -> nixl_status_t:  # an answer
    return nixl_status_t.NIXL_SUCCESS if yes else nixl_status_t.NIXL_ERR_NOT_FOUND


class nixlAgent:
    """An agent with the calls of NIXL's C++ interface, those of `_CALLS`.

    `front` is the nixl_agent over it, which the first call opens.
    """

    front: nixl_agent

    def __init__(self, name: str, config: nixlBind.nixlAgentConfig) -> None:
        if not name:
            raise ValueError("Agent needs a non-empty name")
        self.name, self.config = name, config
        self._handles: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "front":
            return nixl_agent.over(self)  # which sets it
        if name not in _CALLS:
            raise AttributeError(f"nixlAgent has no {name}")
        return partial(_CALLS[name], self)

    def keep(self, handle: Any) -> int:
        """Keep a handle of the nixl_agent; return its number."""
        self._handles[handle._handle] = handle
        return int(handle._handle)

    def handle(self, number: int) -> Any:
        if number not in self._handles:
            raise nixlBind.nixlInvalidParamError(f"handle {number} is not known")
        return self._handles[number]

    def release(self, number: int) -> nixl_status_t:
        self.handle(number).release()
        del self._handles[number]
        return nixl_status_t.NIXL_SUCCESS


def _params(a: nixlAgent, type: str) -> tuple[dict[str, str], list[str]]:
    if type not in PLUGINS:
        raise nixlBind.nixlNotFoundError(f"plugin {type!r}; there are {PLUGINS}")
    return dict(PARAMS), list(MEMS)


def _create(a: nixlAgent, type: str, initParams: dict[str, str]) -> int:
    a.front.create_backend(type, initParams)
    return a.front.backends[type]


def _notifs(a: nixlAgent, notif_map: dict[str, list[bytes]], backends: Any = ()) -> Any:
    for name, messages in a.front.get_new_notifs().items():
        notif_map.setdefault(name, []).extend(messages)
    return notif_map


def _prep(a: nixlAgent, agent_name: Any, descs: Any = None, backend: Any = ()) -> int:
    if not isinstance(descs, nixlBind.nixlXferDList):  # without a name: this agent's memory
        agent_name, descs = "", agent_name
    return a.keep(a.front.prep_xfer_dlist(agent_name, descs))


def _make(
    a: nixlAgent,
    operation: nixlBind.nixl_xfer_op_t,
    local_side: int,
    local_indices: Any,
    remote_side: int,
    remote_indices: Any,
    notif_msg: str | bytes = "",
    backend: Any = (),
    skip_desc_merg: bool = False,
) -> int:
    sides = a.handle(local_side), local_indices, a.handle(remote_side), remote_indices
    return a.keep(a.front.make_prepped_xfer(_OPS[operation], *sides, raw_of(notif_msg)))


def _create_xfer(
    a: nixlAgent,
    operation: nixlBind.nixl_xfer_op_t,
    local_descs: Any,
    remote_descs: Any,
    remote_agent: str | bytes,
    notif_msg: str | bytes = "",
    backend: Any = (),
) -> int:
    told = remote_agent, raw_of(notif_msg)
    return a.keep(a.front.initialize_xfer(_OPS[operation], local_descs, remote_descs, *told))


def _invalidate(a: nixlAgent, agent: str | bytes) -> nixl_status_t:
    own = text_of(agent) == a.name
    return nixl_status_t.NIXL_ERR_INVALID_PARAM if own else _known(a.front.forget(text_of(agent)))


_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "getAvailPlugins": lambda a: a.front.get_plugin_list(),
    "getPluginParams": _params,
    "getBackendParams": lambda a, backend: ({}, list(MEMS)),
    "createBackend": _create,
    "registerMem": lambda a, descs, backends=(): _done(a.front.register_memory(descs)),
    "deregisterMem": lambda a, descs, backends=(): _done(a.front.deregister_memory(descs)),
    "queryMem": lambda a, descs, backend: a.front.query_memory(descs, next(iter(a.front.backends))),
    "prepMemView": lambda a, dlist, backends=(): a.front.prep_mem_view(dlist),
    "releaseMemView": lambda a, mvh: a.front.release_mem_view(mvh),
    "prepXferDlist": _prep,
    "makeXferReq": _make,
    "createXferReq": _create_xfer,
    "estimateXferCost": lambda a, req: (*a.front.estimate_xfer_cost(a.handle(req))[:2], 0),
    "postXferReq": lambda a, reqh, msg="": _state(a.front.transfer(a.handle(reqh), raw_of(msg))),
    "getXferStatus": lambda a, reqh: _state(a.front.check_xfer_state(a.handle(reqh))),
    "getXferTelemetry": lambda a, reqh: a.front.get_xfer_telemetry(a.handle(reqh)),
    "queryXferBackend": lambda a, reqh: a.front.backends[
        a.front.query_xfer_backend(a.handle(reqh))
    ],
    "releaseXferReq": lambda a, reqh: a.release(reqh),
    "releasedDlistH": lambda a, handle: a.release(handle),
    "getNotifs": _notifs,
    "genNotif": lambda a, agent, msg, backends=(): _done(a.front.send_notif(agent, raw_of(msg))),
    "makeConnection": lambda a, agent, backends: _done(a.front.make_connection(agent)),
    "getLocalMD": lambda a: a.front.get_agent_metadata(),
    "getLocalPartialMD": lambda a, descs, inc_conn_info=False, backends=(): (
        a.front.get_partial_agent_metadata(descs, inc_conn_info)
    ),
    "loadRemoteMD": lambda a, metadata: a.front.add_remote_agent(metadata),
    "invalidateRemoteMD": _invalidate,
    "checkRemoteMD": lambda a, agent, descs: _known(a.front.check_remote_metadata(agent, descs)),
    "sendLocalMD": lambda a, *where, **to: a.front.send_local_metadata(*where, **to),
    "sendLocalPartialMD": lambda a, descs, inc_conn_info=False, backends=(), *where, **to: (
        a.front.send_partial_agent_metadata(descs, inc_conn_info, [], *where, **to)
    ),
    "fetchRemoteMD": lambda a, name, *at, **to: a.front.fetch_remote_metadata(name, *at, **to),
    "invalidateLocalMD": lambda a, *where, **to: a.front.invalidate_local_metadata(*where, **to),
}

nixlBind.nixlAgent = nixlAgent
