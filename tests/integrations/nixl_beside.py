"""Drawn calls on NIXL (UCX) and on tep: the same states, values and classes of errors.

Each world has two agents that may know each other, memory, prepared lists and transfers. A call is
drawn with arguments that fit, and with some that do not. The differences on purpose are in BETTER.

The last line on stdout is a JSON object with `ok`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import nixl._api as theirs
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tep.compat.nixl import api as ours

NBYTES = 1 << 14
WAIT_S = 20.0
NAMES = ("A", "B", "C", "")
MEMS = (None, "DRAM", "VRAM", "cpu", "NVMe")

BETTER = {
    "a descriptor that is none": "TypeError names it; NIXL: RuntimeError, ValueError, IndexError",
    "a transfer of memory that its owner has deregistered": "nixlBackendError; NIXL: DONE",
    "a released handle": "an error; NIXL reads freed memory",
    "two rows that end in the same bytes": "nixlBackendError; NIXL leaves open which one wins",
    "partial metadata of memory that was deregistered": "nixlNotFoundError; NIXL gives it",
    "an empty row right behind a region": "found; NIXL: it depends on other regions",
    "check_remote_metadata of oneself": "False; NIXL: True or False",
}
"""The differences on purpose. Calls are drawn for the second alone, which ends its world."""


class World:
    """Two agents on one implementation."""

    def __init__(self, api: ModuleType, number: int) -> None:
        self.api = api
        self.agents = {}
        self.memory, self.regs = {}, {}
        for name in "AB":
            config = api.nixl_agent_config(backends=["UCX"], capture_telemetry=True)
            self.agents[name] = api.nixl_agent(f"{name}{number}", config)
            self.memory[name] = np.zeros(NBYTES, np.uint8)
            self.regs[name] = []
        self.number = number
        self.gave_back = False
        self.lists: list[Any] = []
        self.handles: list[Any] = []

    def name(self, which: str) -> str:
        return f"{which}{self.number}" if which else ""

    def rows(self, who: str, spans: Any) -> list[tuple[int, int, int]]:
        at = self.memory[who].ctypes.data
        return [(at + start, length, 0) for start, length in spans]

    def pick(self, some: list[Any], index: int) -> Any:
        return some[index % len(some)] if some else None

    def close(self) -> None:
        for agent in self.agents.values():
            for _, handle in self.handles:
                with contextlib.suppress(Exception):  # it was released, or its agent has gone
                    handle.release()
            if hasattr(agent, "close"):
                agent.close()


def answer(world: World, call: Callable[[World], Any]) -> str:
    """The answer of one call, as a word that both implementations can give."""
    try:
        found = call(world)
    except Exception as error:  # noqa: BLE001  # its class is the answer
        return type(error).__name__
    if found is None or isinstance(found, bool | int | str | tuple):
        return repr(found)
    if isinstance(found, bytes):
        return "bytes"
    return type(found).__name__


SPAN = st.tuples(st.sampled_from((0, 64, NBYTES - 64, NBYTES)), st.sampled_from((0, 8, 64))).filter(
    lambda span: span != (NBYTES, 0)
)
SPANS = st.lists(SPAN, min_size=1, max_size=3, unique_by=lambda span: span[0])
WHO = st.sampled_from("AB")
NAME = st.sampled_from(NAMES)
MEM = st.sampled_from(MEMS)
INDEX = st.integers(0, 7)
OP = st.sampled_from(("READ", "WRITE", "PUT"))
BACKENDS = st.sampled_from(([], ["UCX"], ["NOPE"]))
NOTIF = st.sampled_from((b"", b"x", b"n\0t"))


def register(who: str, spans: Any, mem: str | None, backends: list[str]) -> Callable[[World], Any]:
    def call(w: World) -> Any:
        rows = [(*row, "") for row in w.rows(who, spans)]
        found = w.agents[who].register_memory(rows, mem, backends)
        w.regs[who].append(found)
        return found.descCount()

    return call


def deregister(who: str, index: int) -> Callable[[World], Any]:
    def call(w: World) -> Any:
        reg = w.pick(w.regs[who], index)
        if reg is not None:
            w.agents[who].deregister_memory(reg)
            w.gave_back = True
            w.regs[who] = [one for one in w.regs[who] if one is not reg]

    return call


def meet(who: str, other: str) -> Callable[[World], Any]:
    def call(w: World) -> Any:
        found = w.agents[who].add_remote_agent(w.agents[other].get_agent_metadata())
        return found.decode()[0]

    return call


def partial(who: str, index: int, conn: bool) -> Callable[[World], Any]:
    def call(w: World) -> Any:
        reg = w.pick(w.regs[who], index)
        if reg is None:
            return None
        return len(w.agents[who].get_partial_agent_metadata(reg, conn)) > 0

    return call


def transfer(
    who: str, op: str, mine: Any, theirs_: Any, name: str, notif: bytes
) -> Callable[[World], Any]:
    def call(w: World) -> Any:
        agent, other = w.agents[who], name if name in {"A", "B"} else "B"
        lists = [
            agent.get_xfer_descs(w.rows(side, spans), "DRAM")
            for side, spans in ((who, mine), (other, theirs_))
        ]
        handle = agent.initialize_xfer(op, *lists, w.name(name), notif)
        w.handles.append((who, handle))
        return run(agent, handle)

    return call


def run(agent: Any, handle: Any) -> str:
    try:
        agent.check_xfer_state(handle)
        before = "posted"
    except Exception as error:  # noqa: BLE001  # its class is part of the answer
        before = type(error).__name__
    state, end_s = agent.transfer(handle), time.monotonic() + WAIT_S
    while state == "PROC" and time.monotonic() < end_s:
        state = agent.check_xfer_state(handle)
    told = agent.get_xfer_telemetry(handle)
    cost = agent.estimate_xfer_cost(handle)[:2]
    return f"{before} {state} {told.totalBytes} {told.descCount} {cost}"


def again(who: str, index: int, notif: bytes) -> Callable[[World], Any]:
    def call(w: World) -> Any:
        handle = w.pick([one for whose, one in w.handles if whose == who], index)
        return None if handle is None else run(w.agents[who], handle)

    return call


def prepped(who: str, name: str, spans: Any, indices: Any, op: str) -> Callable[[World], Any]:
    def call(w: World) -> Any:
        agent, other = w.agents[who], name if name in {"A", "B"} else "B"
        mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", w.rows(who, spans), "DRAM")
        there = agent.prep_xfer_dlist(w.name(name), w.rows(other, spans), "DRAM")
        handle = agent.make_prepped_xfer(op, mine, indices, there, indices)
        w.handles.append((who, handle))
        return run(agent, handle)

    return call


def notify(who: str, name: str, notif: bytes) -> Callable[[World], Any]:
    return lambda w: w.agents[who].send_notif(w.name(name), notif)


def heard(w: World) -> dict[str, list[bytes]]:
    """What each agent was notified of."""
    told = {who: agent.update_notifs() for who, agent in w.agents.items()}
    return {f"{who} {name[:1]}": got for who in told for name, got in sorted(told[who].items())}


def known(who: str, name: str, spans: Any) -> Callable[[World], Any]:
    def call(w: World) -> Any:
        if name == who:
            return None
        agent, other = w.agents[who], name if name in {"A", "B"} else "B"
        descs = None if spans is None else agent.get_xfer_descs(w.rows(other, spans), "DRAM")
        return agent.check_remote_metadata(w.name(name), descs)

    return call


def plain(who: str, method: str, *arguments: Any) -> Callable[[World], Any]:
    return lambda w: getattr(w.agents[who], method)(*arguments)


def forget(who: str, name: str) -> Callable[[World], Any]:
    return lambda w: w.agents[who].remove_remote_agent(w.name(name))


def lists(who: str, method: str, mem: str | None, form: str) -> Callable[[World], Any]:
    def call(w: World) -> Any:
        rows = w.rows(who, [(0, 8), (8, 8)])
        given_ = {
            "rows": rows,
            "array": np.array(rows),
            "four": [(*row, "") for row in rows],
            "wide": np.zeros((2, 4), np.int64),
        }[form]
        found = getattr(w.agents[who], method)(given_, mem)
        return None if found is None else f"{found.descCount()} {found.getType().name}"

    return call


CALLS = st.one_of(
    st.builds(register, WHO, SPANS.filter(lambda s: all(a + n <= NBYTES for a, n in s)),
              st.sampled_from((None, "DRAM", "cpu", "NVMe")), BACKENDS),
    st.builds(deregister, WHO, INDEX),
    st.builds(meet, WHO, WHO),
    st.builds(meet, st.just("A"), st.just("B")),
    st.builds(partial, WHO, INDEX, st.booleans()),
    st.builds(transfer, WHO, OP, SPANS, SPANS, NAME, NOTIF),
    st.builds(lambda who, op, spans, name, n: transfer(who, op, spans, spans, name, n),
              WHO, OP, SPANS, st.sampled_from("AB"), NOTIF),
    st.builds(again, WHO, INDEX, NOTIF),
    st.builds(prepped, WHO, NAME, SPANS, st.sampled_from(([0], [1, 0], [9])), OP),
    st.builds(notify, WHO, NAME, NOTIF.filter(bool)),
    st.builds(known, WHO, NAME, st.one_of(st.none(), SPANS)),
    st.builds(forget, WHO, NAME),
    st.builds(lists, WHO, st.sampled_from(("get_xfer_descs", "get_reg_descs")), MEM,
              st.sampled_from(("rows", "array", "four", "wide"))),
    st.builds(plain, WHO, st.just("create_backend"), st.sampled_from(("UCX", "NOPE"))),
    st.builds(plain, WHO, st.just("add_remote_agent"), st.just(b"junk")),
    st.builds(plain, WHO, st.just("get_plugin_mem_types"), st.sampled_from(("UCX", "NOPE"))),
    st.builds(plain, WHO, st.just("fetch_remote_metadata"), st.just("Z"), st.just("")),
    st.builds(plain, WHO, st.just("send_local_metadata"), st.just("")),
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Compare, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    os.environ.setdefault("TEP_NIXL_BACKEND", "local")
    os.environ.pop("NIXL_TELEMETRY_ENABLE", None)
    counts = {"calls": 0, "worlds": 0}
    differ: list[str] = []

    @seed(options.seed)
    @settings(
        max_examples=max(1, options.calls // 20), deadline=None, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def compare(data: st.DataObject) -> None:
        counts["worlds"] += 1
        worlds = [World(api, counts["worlds"]) for api in (theirs, ours)]
        done: list[str] = []
        know = data.draw(st.booleans())
        start = [register(who, [(0, NBYTES)], "DRAM", []) for who in "AB"]
        start += [meet(who, other) for who, other in ("AB", "BA")]
        for k in range(20):
            call = start[k] if know and k < len(start) else data.draw(CALLS)
            answers = [answer(world, call) for world in worlds]
            counts["calls"] += 1
            cells = getattr(call, "__closure__", None) or ()
            done.append(f"{call.__qualname__.split('.')[0]}{[c.cell_contents for c in cells]}")
            better = worlds[1].gave_back and "DONE" in answers[0]
            if better and answers[1] == "nixlBackendError":  # see BETTER
                for world in worlds:
                    world.close()
                return
            if answers[0] != answers[1]:
                differ.append(f"{done[-1]}: NIXL {answers[0]}, tep {answers[1]}; after {done[:-1]}")
                break
        end_s = time.monotonic() + WAIT_S
        while (told := list(map(heard, worlds)))[0] != told[1] and time.monotonic() < end_s:
            pass
        if told[0] != told[1] and not differ:
            differ.append(f"notifications: NIXL {told[0]}, tep {told[1]}; after {done}")
        for world in worlds:
            world.close()

    compare()
    for one in differ:
        sys.stderr.write(f"{one}\n")
    found = {"ok": not differ, **counts, "differences": len(differ)}
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()
    os._exit(0 if not differ else 1)  # NIXL 1.5.1 ends with a segmentation fault


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
