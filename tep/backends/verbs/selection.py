"""Every RDMA device as libibverbs shows it, and those that are taken when none are named.

The rules are in tep.host.nics.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tep.backends.ffi.ibverbs import Library
from tep.backends.verbs.depths import ROWS, peer_bytes
from tep.backends.verbs.device import Device
from tep.backends.verbs.hints import NO_HINTS, Hints
from tep.backends.verbs.settings import Settings
from tep.base.errors import BackendUnavailable, FabricError, UsageError
from tep.host.environment import NameList
from tep.host.nics import Found, choose, natural

__all__ = ["choose_count", "survey"]


def survey(lib: Library, settings: Settings, hints: Hints = NO_HINTS) -> list[Found]:
    """Look at every device, fastest first; unusable ones last, with the reason."""
    found = []
    for name, folder in lib.devices():
        physical = Path(folder, "device", "physfn")
        path = os.path.realpath(Path(folder, "device")) if Path(folder, "device").exists() else ""
        try:
            device = Device(lib, name, settings, hints)
        except (BackendUnavailable, FabricError, UsageError) as error:
            found.append(Found(name, f"{error}", usable=False, path=path))
            continue
        others = "".join(f"; then {choice}" for choice in device.gids if choice != device.gid)
        found.append(
            Found(
                name,
                device.describe() + others,
                usable=True,
                link_bps=device.link_bps,
                is_ib=device.is_ib,
                subnet=device.gid.seen.gid[:8].hex() if device.is_ib else "",
                path=path,
                peer_bytes=peer_bytes(device, settings.sq_depth or ROWS),
                physical=os.path.realpath(physical) if physical.exists() else "",
            )
        )
        device.close()
    return sorted(found, key=lambda seen: (not seen.usable, -seen.link_bps, natural(seen.name)))


def choose_count(
    found: Sequence[Found], gpus: Sequence[str], count: int | None, hca: NameList | None = None
) -> list[str]:
    """Names of the first `count` NICs that belong together, or of all.

    Raises:
        BackendUnavailable: there are not so many; says what is there and why it was not taken.
    """
    choice = choose(found, gpus, hca)
    if len(choice.taken) < (count or 1):
        tried = [*((seen.name, seen.text) for seen in choice.taken), *choice.left]
        raise BackendUnavailable(
            f"{len(choice.taken)} usable RDMA devices that belong together, "
            f"{count or 'at least 1'} wanted; name the devices to take others (nics=[...]); on a "
            "machine without an RDMA NIC, scripts/rxe runs a command beside software ones",
            tuple(tried) or (("list devices", "there is none"),),
        )
    return [seen.name for seen in choice.taken[:count]]
