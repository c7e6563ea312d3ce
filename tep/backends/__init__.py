"""The registry: which backends there are, imported at first use, and why one is missing.

A name maps to a module and to what would bring it; nothing else in tep's core names a backend.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, cast

from tep.backends.base import Opened
from tep.base.checks import check_int, check_seconds, check_text, nearest
from tep.base.distribution import install
from tep.base.errors import BackendUnavailable, UsageError

__all__ = [
    "BACKENDS", "BackendModule", "BackendSpec", "load_backend", "open_backend", "open_device",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """One line of the registry.

    Attributes:
        module: what is imported; it has `open_domains(**options) -> Opened` and `probe() -> str`.
        summary: what it drives, for `tep info`.
        cure: what to do where it cannot run.
    """

    module: str
    summary: str
    cure: str


class BackendModule(Protocol):
    """The two functions of a backend's module."""

    def open_domains(self, **options: object) -> Opened:
        """Open the NICs of one device.

        Raises BackendUnavailable, or UsageError for options it does not know.
        """

    def probe(self) -> str:
        """Say what is here (versions, NICs) in one line.

        Raises BackendUnavailable with what was tried.
        """


BACKENDS: Mapping[str, BackendSpec] = MappingProxyType(
    {
        "loopback": BackendSpec(
            module="tep.backends.loopback",
            summary="engines of one process, memory to memory, in order",
            cure="nothing is needed",
        ),
        "local": BackendSpec(
            module="tep.backends.local",
            summary="processes of one host, memory to memory, without any library",
            cure="Linux, and a Python on glibc 2.27 or later",
        ),
        "libfabric": BackendSpec(
            module="tep.backends.libfabric",
            summary="libfabric: AWS EFA; tcp on any Linux machine",
            cure=f"{install('libfabric')}, or TEP_LIBFABRIC=/path/to/libfabric.so.1",
        ),
        "efa": BackendSpec(
            module="tep.backends.efa",
            summary="AWS EFA through libibverbs and libefa, without libfabric",
            cure="the EFA installer, on an instance with EFA; TEP_LIBEFA=/path/to/libefa.so.1",
        ),
        "verbs": BackendSpec(
            module="tep.backends.verbs",
            summary="RDMA NICs through libibverbs: ConnectX (RC), and Soft-RoCE",
            cure="apt install libibverbs1 ibverbs-providers; without a NIC: scripts/rxe COMMAND",
        ),
        "auto": BackendSpec(
            module="tep.backends.auto",
            summary="the RDMA NICs of this host if there are any, else local; never anything else",
            cure="open the backend that it chose by name, to see what that lacks",
        ),
    }
)


def load_backend(name: str) -> BackendModule:
    """Import a backend's module.

    Raises:
        UsageError: no such name.
        BackendUnavailable: its module cannot be imported.
    """
    spec = BACKENDS.get(name)
    if spec is None:
        known = f"there are: {', '.join(sorted(BACKENDS))}; tep.sim.Cluster simulates machines"
        raise UsageError(f"backend {name!r} is unknown; {known}{nearest(name, BACKENDS)}")
    try:
        return cast("BackendModule", importlib.import_module(spec.module))
    except ImportError as error:
        raise BackendUnavailable(
            f"backend {name!r} cannot be imported; {spec.cure}",
            ((f"import {spec.module}", str(error)),),
        ) from error


def open_backend(backend: str, /, **options: object) -> Opened:
    """Open the NICs of a backend; options are the backend's own keywords.

    Raises:
        UsageError: an option that it does not have, or a value of another kind.
        BackendUnavailable: it cannot run here.
    """
    open_domains = load_backend(backend).open_domains
    known = inspect.signature(open_domains).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in known.values())
    for name, value in options.items():
        if name in known:
            options[name] = _plain(f"{backend}: {name}", value, str(known[name].annotation))
        elif not takes_all:
            near = nearest(name, known)
            raise UsageError(f"{backend}: no option {name!r}; there are: {', '.join(known)}{near}")
    return open_domains(**options)


def open_device(backend: str, device: str | None, options: dict[str, object]) -> Opened:
    """Open the NICs beside a device, "cuda:N" or "cpu"; None: those that the options name.

    Raises:
        UsageError: as open_backend, or not such a device.
        BackendUnavailable: as open_backend, or no such device, or no NIC for it.
    """
    auto = importlib.import_module("tep.backends.auto")  # it imports this room
    if device is None:
        auto.check_all(backend, options)
        return open_backend(backend, **options)
    opened = auto.open_at(backend, check_text("device", device), options)
    assert isinstance(opened, Opened)
    return opened


def _plain(what: str, value: object, annotation: str) -> object:
    """An option as a plain number, text or list of texts, where it is declared as one.

    The range is the backend's to check.
    """
    kinds = set(annotation.split(" | "))
    if value is None and "None" in kinds:
        return value
    if kinds - {"None"} == {"float"}:
        return check_seconds(what, value, -math.inf, math.inf)
    if "Sequence[str]" in kinds and isinstance(value, list | tuple):
        return [check_text(what, one) for one in value]
    if kinds - {"None"} == {"int"} or ("Sequence[str]" in kinds and not isinstance(value, str)):
        return check_int(what, value)
    return check_text(what, value) if kinds - {"None"} == {"str"} else value
