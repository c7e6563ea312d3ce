"""The backend "auto": looks which NICs this host has, and opens the backend that drives them.

The rule is one line, and it is told: an RDMA device means its own backend, no device means `local`.
There is no second choice. If what the rule names cannot be opened, that is an error which says so;
and an address that the chosen backend cannot reach is refused by it, by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from tep.backends import open_backend
from tep.backends.base import Opened
from tep.base.errors import BackendUnavailable

__all__ = ["Choice", "choose", "open_domains", "probe"]

_DEVICES: Final = Path("/sys/class/infiniband")
"""Every device that a verbs driver of the kernel has made; EFA's are among them."""


class Choice(NamedTuple):
    """What "auto" means on this host: a backend, its options, and why."""

    backend: str
    options: dict[str, object]
    why: str


def choose(devices: Path = _DEVICES) -> Choice:
    """Apply the rule: EFA: libfabric, provider "efa"; any other device: verbs; none: local.

    Args:
        devices: where the kernel lists them.
    """
    try:
        found = sorted(devices.iterdir())
    except OSError:
        found = []
    drivers = {path.name: (path / "device" / "driver").resolve().name for path in found}
    listed = ", ".join(f"{name} ({driver})" for name, driver in drivers.items())
    if "efa" in drivers.values():
        return Choice("libfabric", {"provider": "efa"}, f"EFA devices: {listed}")
    if drivers:
        return Choice("verbs", {}, f"RDMA devices: {listed}")
    return Choice("local", {}, f"no RDMA device in {devices}; only this host can be reached")


def open_domains(**options: object) -> Opened:
    """Open what choose() says, with these options.

    Raises:
        BackendUnavailable: that cannot run here. Nothing else is tried.
    """
    choice = choose()
    try:
        return open_backend(choice.backend, **{**choice.options, **options})
    except BackendUnavailable as error:
        raise BackendUnavailable(
            f"auto: chose {choice.backend} ({choice.why}), which cannot run here; another backend "
            "has to be asked for by name",
            error.tried or ((choice.backend, str(error)),),
        ) from error


def probe() -> str:
    """Say what "auto" means here, and why."""
    choice = choose()
    return f"{choice.backend}: {choice.why}"
