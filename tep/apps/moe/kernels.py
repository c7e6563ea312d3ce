"""A model of the durations of a GPU's kernels and host proxy; numbers come from a file.

What the numbers of `Gpu` are, where they come from, and where they are wrong stands in
profiles/README.md.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from math import inf
from typing import Final

from tep import UsageError

__all__ = ["HOST", "Gpu", "gpu_numbers", "load_gpu", "spend"]

_SCALE: Final = {"us": 1e-6, "ns": 1e-9, "GB/s": 1e9, "B": 1.0, "1": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU with its proxy, by the numbers of a file; seconds and bytes a second.

    `copies` are token copies, `stride` their bytes.

    Attributes:
        memory_bytes_s: what a copying kernel really moves, reads and writes together.
        nvlink_bytes_s, nvlink_latency_s: of the node's link.
        watch, engine_look: a watched word to the callback; how much of it the engine charges.
        flag: proxy to kernel.
        first_transfer: launch to first payload transfer of a decode step at EP64.
        dispatch_send, dispatch_recv, combine_send, combine_recv: kernels of that step.
        push_hidden: so much of a send kernel's NVLink stores hides behind its own barrier.
        route_entry, rest_peer: proxy's CPU for one count, and for one peer's second burst.
    """

    memory_bytes_s: float
    nvlink_bytes_s: float
    nvlink_latency_s: float
    watch: float
    engine_look: float
    flag: float
    first_transfer: float
    dispatch_send: float
    dispatch_recv: float
    combine_send: float
    combine_recv: float
    push_hidden: float
    route_entry: float
    rest_peer: float

    def doubts(self, factor: float) -> Iterator[tuple[str, Gpu]]:
        """Yield both ends of what is guessed, all of it times; see tep.sim.doubts."""
        numbers = gpu_numbers()["gpu"] | gpu_numbers()["proxy"]
        guessed = [key for key, one in numbers.items() if one["confidence"] == "guessed"]
        for end, times in (("slow", factor), ("fast", 1 / factor)):
            yield end, replace(self, **{key: getattr(self, key) * times for key in guessed})

    # The step that the kernel times are of: EP64, 128 tokens, top 8, 7 of 8 copies leave the node.
    _COPIES = 1024
    _AWAY = 896
    _TOKENS = 128
    _DISPATCH = 7408
    _COMBINE = 14_336

    def launch_s(self) -> float:
        """Kernel start to its first word written."""
        return self.first_transfer - self.watch - self.copy_s(self._AWAY, self._DISPATCH)

    def watch_s(self) -> float:
        """Word written to proxy running, beyond what the engine's own look costs."""
        return self.watch - self.engine_look

    def flag_s(self) -> float:
        """Proxy to a waiting kernel."""
        return self.flag

    def routes_s(self, entries: int, rest: int) -> float:
        """Proxy's CPU for the routes: so many counts, and second bursts to so many peers."""
        return self.route_entry * entries + self.rest_peer * rest

    def copy_s(self, copies: int, stride: int) -> float:
        """Staging: read and write each copy in the GPU's memory."""
        return 2 * copies * stride / self.memory_bytes_s

    def send_rest_s(self, stage: str, pushed_s: float) -> float:
        """Rest of a send kernel ("dispatch", "combine") once pushes took `pushed_s`."""
        whole, stride = self.dispatch_send, self._DISPATCH
        if stage == "combine":
            whole, stride = self.combine_send, self._COMBINE
        rest = whole - self.launch_s() - self.copy_s(self._AWAY, stride)
        # What was pushed has taken its time already; the part that hides is not paid twice.
        return rest - min(pushed_s, self.push_hidden)

    def receive_launch_s(self, stage: str) -> float:
        """Start of a receive kernel, before it can use what arrives."""
        if stage == "combine":
            return self.combine_recv - self.sum_s(self._COPIES, self._TOKENS, self._COMBINE)
        return self.dispatch_recv - self.copy_s(self._COPIES, self._DISPATCH)

    def sum_s(self, copies: int, tokens: int, stride: int) -> float:
        """Weighted sum: read each result, write each token."""
        return (copies + tokens) * stride / self.memory_bytes_s


HOST: Final = Gpu(
    **{one.name: 0.0 for one in fields(Gpu)} | {"memory_bytes_s": inf, "nvlink_bytes_s": inf}
)
"""No GPU: numpy does the work, in its own time, and nothing is added."""


async def spend(seconds: float) -> None:
    """Let time pass: simulated, or the event loop's."""
    if seconds > 0:
        await asyncio.sleep(seconds)


@cache
def gpu_numbers() -> dict[str, dict[str, dict[str, object]]]:
    """Read profiles/hopper.toml: section -> key -> value, unit, source, confidence."""
    path = files("tep.apps.moe").joinpath("profiles", "hopper.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def load_gpu(nic: str) -> Gpu:
    """Load the GPU as the host of one kind of NIC: "cx7" or "efa".

    Raises:
        UsageError: an unknown NIC.
    """
    proxy = gpu_numbers().get(f"proxy_{nic}")
    if proxy is None:
        raise UsageError(f"proxy of NIC {nic!r} is unknown; there are: cx7, efa")
    found: dict[str, float] = {}
    for table in (gpu_numbers()["gpu"], gpu_numbers()["proxy"], proxy):
        for key, number in table.items():
            value, unit = number["value"], number["unit"]
            assert isinstance(value, int | float)
            found[key] = value * _SCALE[str(unit)]
    return Gpu(**found)
