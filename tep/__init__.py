"""The public names of tep, and nothing else: each is imported from its room when it is first used.

`import tep` loads no shared library (numpy included) and starts no thread. No logic lives here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tep import apps, cuda, rendezvous, sim, testing
    from tep.backends.base import Access
    from tep.backends.local.memory import alloc_shared
    from tep.base.api import (
        Barrier,
        EngineOptions,
        Paged,
        Pages,
        Routing,
        Scatter,
        ScatterDst,
        Sender,
        Single,
    )
    from tep.base.errors import (
        BackendUnavailable,
        BadDescriptor,
        BadRequest,
        BurntImm,
        BusyError,
        CallbackError,
        Cancelled,
        ClosedError,
        FabricError,
        RendezvousError,
        StaleEpoch,
        StallError,
        TepError,
        UsageError,
        WaitTimeout,
    )
    from tep.base.wire import MrDesc, NetAddr
    from tep.control.membership import PeerChange, PeerEvent, PeerState, PeerWatch
    from tep.core.handles import Expectation, Message, Removal, Transfer
    from tep.core.plan import count_imms
    from tep.core.regions import MrHandle
    from tep.cuda.arena import alloc
    from tep.cuda.checksum import checksum
    from tep.drivers.threads import InlineDriver, ThreadDriver
    from tep.engine import PeerGroup, Prepared, TransferEngine
    from tep.memory.watch import Watcher
    from tep.observe.trace import Span, Trace

__version__ = "0.1.0"

__all__ = [
    "Access", "BackendUnavailable", "BadDescriptor", "BadRequest", "Barrier", "BurntImm",
    "BusyError", "CallbackError", "Cancelled", "ClosedError", "EngineOptions", "Expectation",
    "FabricError", "InlineDriver", "Message", "MrDesc", "MrHandle", "NetAddr", "Paged", "Pages",
    "PeerChange", "PeerEvent", "PeerGroup", "PeerState", "PeerWatch", "Prepared", "Removal",
    "RendezvousError", "Routing", "Scatter", "ScatterDst", "Sender", "Single", "Span",
    "StaleEpoch", "StallError", "TepError", "ThreadDriver", "Trace", "Transfer", "TransferEngine",
    "UsageError", "WaitTimeout", "Watcher", "__version__", "alloc", "alloc_shared", "apps",
    "checksum", "count_imms", "cuda", "rendezvous", "sim", "testing",
]  # fmt: skip

_ROOM_OF = {
    name: room
    for room, names in {
        "tep.base.api": (
            "Barrier EngineOptions Paged Pages Routing Scatter ScatterDst Sender Single"
        ),
        "tep.drivers.threads": "InlineDriver ThreadDriver",
        "tep.base.errors": (
            "BackendUnavailable BadDescriptor BadRequest BurntImm BusyError CallbackError "
            "Cancelled ClosedError FabricError RendezvousError StaleEpoch StallError TepError "
            "UsageError WaitTimeout"
        ),
        "tep.control.membership": "PeerChange PeerEvent PeerState PeerWatch",
        "tep.core.plan": "count_imms",
        "tep.backends.base": "Access",
        "tep.cuda.arena": "alloc",
        "tep.cuda.checksum": "checksum",
        "tep.backends.local.memory": "alloc_shared",
        "tep.core.regions": "MrHandle",
        "tep.core.handles": "Expectation Message Removal Transfer",
        "tep.engine": "PeerGroup Prepared TransferEngine",
        "tep.observe.trace": "Span Trace",
        "tep.memory.watch": "Watcher",
        "tep.base.wire": "MrDesc NetAddr",
    }.items()
    for name in names.split()
}

if not TYPE_CHECKING:  # a checker that saw __getattr__ would believe in every misspelt name

    def __getattr__(name: str) -> object:
        """Import a public name from its room, once; afterwards it is an ordinary attribute."""
        if name in {"apps", "cuda", "rendezvous", "sim", "testing"}:
            return importlib.import_module(f"tep.{name}")
        room = _ROOM_OF.get(name)
        if room is None:
            raise AttributeError(f"module 'tep' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(room), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
