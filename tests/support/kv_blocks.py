"""Drawn runs of KvSender and KvReceiver on the chaos fabric, against a reference in numpy.

Sources hold garbage until a layer is computed and are scribbled over once they are free; targets
are painted before and after. So early reads, late reads and writes after the end all show.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field, replace

import numpy as np

from tep import EngineOptions, sim
from tep.apps.kvcache import Patience
from tep.apps.kvcache.blocks import KvBlocks, KvLoad, KvReceiver, KvSend, KvSender

US = 1e-6
HEADS, TOKENS, RUN, LAYERS, BLOCKS = 4, 4, 8, 3, 12
PAINT, GARBAGE = 0xA5, 0x5C
PATIENCE = Patience(  # an engine may be held up for 3 ms, and is not silent for that
    beat_s=10 * US, silent_s=100 * US, cancel_s=50 * US, request_s=0.2, linger_s=10_000 * US
)
AXES = "lpbht"  # layer, plane (K or V), block, head, token; the elements come last
MLA = "mla"  # its tensors have one head, other tokens a block, and blocks of their own


@dataclass
class Case:
    """One run: two layouts, two degrees of parallelism, some requests and what befalls them."""

    seed: int
    axes: tuple[str, str]
    apart: tuple[bool, bool]
    tp: tuple[int, int]
    mla: bool
    requests: int
    chunks: int
    cancels: tuple[str, ...]
    cancel_us: tuple[float, ...]
    crash: bool = False
    lost: int = 0  # of 16 messages
    corrupt: int = 0  # of 256 rows

    @property
    def joined(self) -> bool:
        """Whether K and V of a layer are two planes of one tensor."""
        return self.seed % 2 == 1

    @property
    def checksums(self) -> bool:
        """Whether senders add checksums."""
        return self.seed // 2 % 2 == 1

    @classmethod
    def draw(cls, dice: random.Random, *, trouble: bool = True) -> Case:
        shuffled = ["".join(dice.sample(AXES, len(AXES))) for _ in range(2)]
        n = dice.randint(1, 3)
        kinds = ("none", "sender", "receiver", "deadline") if trouble else ("none",)
        return cls(
            dice.randrange(1 << 32),
            (shuffled[0], shuffled[1]),
            (dice.random() < 0.5, dice.random() < 0.5),
            (dice.choice((1, 2, 4, 8)), dice.choice((1, 2, 4, 8))),
            dice.random() < 0.5,
            n,
            dice.randint(1, 3),
            tuple(dice.choice(kinds) for _ in range(n)),
            tuple(dice.uniform(0, 60) for _ in range(n)),
            trouble and dice.random() < 0.2,
            dice.choice((0, 0, 2, 6)) if trouble else 0,
        )


class Rank:
    """One rank's cache and its tensors as logical views [block, head, token, element]."""

    def __init__(self, engine, case: Case, side: int, rank: int, fill: int) -> None:
        tp = case.tp[side]
        self.held = range(rank * HEADS // tp, max(rank * HEADS // tp + 1, (rank + 1) * HEADS // tp))
        sizes = {"l": LAYERS, "p": 2, "b": BLOCKS, "h": len(self.held), "t": TOKENS}
        axes = case.axes[side]
        self.views: dict[str, np.ndarray] = {}
        whole = np.full([sizes[a] for a in axes] + [RUN], fill, np.uint8)
        self.blocks = KvBlocks(engine, tp=tp, rank=rank)
        for layer in range(LAYERS):
            left = "".join(a for a in axes if a != "l") + "d"
            both = whole[(slice(None),) * axes.index("l") + (layer,)]
            if case.joined:
                both = both.copy() if case.apart[side] else both
                self.blocks.add(f"{layer}", layer, both, left, heads=HEADS)
            for plane in range(2):
                view = both[(slice(None),) * left.index("p") + (plane,)]
                name, rest = f"{layer}.{'kv'[plane]}", left.replace("p", "")
                if not case.joined:
                    view = view.copy() if case.apart[side] else view
                    self.blocks.add(name, layer, view, rest, heads=HEADS)
                self.views[name] = view.transpose([rest.index(a) for a in "bhtd"])
        if case.mla:
            for layer in range(LAYERS):
                array = np.full((BLOCKS, 2, RUN), fill, np.uint8)
                self.blocks.add(f"{layer}.{MLA}", layer, array, "btd", heads=1, group=1)
                self.views[f"{layer}.{MLA}"] = array[:, None]

    def group(self, name: str) -> int:
        return int(name.endswith(MLA))

    def paint(self, ids: list[list[int]], value: int) -> None:
        for name, view in self.views.items():
            view[ids[self.group(name)]] = value


def content(request: str, name: str, nblocks: int, heads: range) -> np.ndarray:
    """Compute the contents of a request's blocks: [block, head, token, element], by a formula."""
    one = name.endswith(MLA)
    shape = (nblocks, 1 if one else HEADS, 2 if one else TOKENS, RUN)
    dice = np.random.default_rng(list(f"{request} {name}".encode()))
    found = dice.integers(0, 256, shape, np.uint8)
    return found if one else found[:, heads.start : heads.stop]


@dataclass
class Run:
    """The events of a run, and its faults."""

    violations: list[str] = field(default_factory=list)
    done: int = 0
    failed: int = 0
    crashed: bool = False


def run_case(case: Case) -> Run:
    """Play one case to its end."""
    found = Run()
    names = [f"s{k}" for k in range(case.tp[0])] + [f"r{k}" for k in range(case.tp[1])]
    chaos = replace(sim.Chaos.draw(case.seed), message_loss=case.lost, corrupt=case.corrupt)
    probing = EngineOptions(probe_first_s=50 * US, probe_max_s=400 * US)
    with sim.Cluster(
        len(names), names=names, seed=case.seed, chaos=chaos, options=probing
    ) as cluster:
        cluster.run(_play(case, cluster, found))
        for engine in cluster.engines:
            found.violations += [f"{engine.name}: {e}" for e in engine.callback_errors]
    return found


async def _play(case: Case, cluster: sim.Cluster, found: Run) -> None:
    engines = cluster.engines
    sources = [Rank(engines[k], case, 0, k, GARBAGE) for k in range(case.tp[0])]
    sinks = [Rank(engines[case.tp[0] + k], case, 1, k, PAINT) for k in range(case.tp[1])]
    senders = [KvSender(one.blocks, patience=PATIENCE, checksums=case.checksums) for one in sources]
    receivers = [KvReceiver(one.blocks, patience=PATIENCE) for one in sinks]
    for sender in senders:
        for sink in sinks:
            sender.connect(sink.blocks.card())
    dice = random.Random(case.seed)
    ngroups = 1 + case.mla
    per = BLOCKS // 3
    plays = []
    for index in range(case.requests):
        pick = [dice.sample(range(index * per, (index + 1) * per), per) for _ in range(2 * ngroups)]
        n = [dice.randint(1, per) for _ in range(ngroups)]
        skip = dice.randrange(n[0]) if not case.mla else 0
        src = [pick[g][: n[g]] for g in range(ngroups)]
        dst = [pick[ngroups + g][: n[g] - (skip if g == 0 else 0)] for g in range(ngroups)]
        plays.append(
            asyncio.create_task(
                _request(case, index, (sources, sinks), (senders, receivers), (src, dst), found)
            )
        )
    if case.crash:
        await asyncio.sleep(dice.uniform(0, 60) * US)
        dead = engines[0].main_address
        cluster.restart(0)
        found.crashed = True
        for receiver in receivers:
            receiver.fenced(dead.name, dead.epoch)
    done = await asyncio.gather(*plays, return_exceptions=True)
    found.violations += [f"{type(e).__name__}: {e}" for e in done if isinstance(e, Exception)]
    living = senders[found.crashed :]
    for turn in range(1000):  # what is on the wire lands, and each end is told
        if turn >= 20 and all(one.idle for one in living):
            break
        await asyncio.sleep(PATIENCE.cancel_s)
        for side in (*senders, *receivers):
            side.poll()
    if not all(one.idle for one in living):  # told in vain: forgotten at last
        await asyncio.sleep(PATIENCE.request_s + PATIENCE.linger_s)
        for one in living:
            one.poll()
    for sink in sinks:
        for name, view in sink.views.items():
            if (view != PAINT).any():
                found.violations.append(f"{name}: written after its blocks were given back")
    for receiver in receivers:
        if receiver.removed and not (found.crashed or case.lost):
            found.violations.append(f"removed, though alive: {list(receiver.removed)}")
        if receiver.imms.live or not receiver.idle:
            found.violations.append(f"live immediates {receiver.imms.live} or loads left")
    for sender in living:
        if not sender.idle:
            found.violations.append("sends or their claims are left")


async def _request(case, index, ranks, sides, lists, found: Run) -> None:
    (sources, sinks), (senders, receivers), (src, dst) = ranks, sides, lists
    name, kind = f"r{index}", case.cancels[index]
    limit_s = 30 * US if kind == "deadline" else None
    await asyncio.sleep(random.Random(case.seed + index).choice((0, 10, 40)) * US)
    loads = [one.expect(name, dst, timeout_s=limit_s) for one in receivers]
    tickets = [load.ticket for load in loads]
    ntokens = len(src[0]) * TOKENS - 1
    sends, tasks = [], []
    loop = asyncio.get_running_loop()
    for source, sender in zip(sources, senders, strict=True):
        if source is sources[0] and found.crashed:
            continue
        send = sender.begin(name, src, tickets, ntokens=ntokens)
        sends.append(send)
        tasks.append(asyncio.create_task(_compute(case, source, send, (src, dst), ntokens, found)))
    victim = {"sender": sends, "receiver": loads}.get(kind)
    if victim:
        loop.call_later(case.cancel_us[index] * US, victim[index % len(victim)].cancel)
        if kind == "receiver":  # as an engine would: all its ranks
            for load in loads:
                loop.call_later(case.cancel_us[index] * US, load.cancel)
    await asyncio.gather(*(_check(sink, load, lists, found) for sink, load in zip(sinks, loads)))
    # A lost message means a lost peer.
    spared = kind == "none" and not (case.crash or case.lost or case.corrupt)
    if spared and not all(load.ok for load in loads):
        found.violations.append(f"{name} failed without a cause: {[x.reason for x in loads]}")
    for send, task in zip(sends, tasks, strict=True):
        if not (found.crashed and send is sends[0]):
            await send.wait_async(PATIENCE.request_s * 4)
            await task
        else:
            task.cancel()
    found.done += all(load.ok for load in loads)
    found.failed += not all(load.ok for load in loads)


async def _compute(case: Case, source: Rank, send: KvSend, lists, ntokens: int, found: Run) -> None:
    """Compute chunk by chunk and layer by layer; scribble over all as soon as it is free."""
    src, _ = lists
    dice = random.Random(case.seed + ord(send.request[1]))
    cuts = sorted(dice.randrange(ntokens + 1) for _ in range(case.chunks - 1))
    with contextlib.suppress(asyncio.CancelledError):
        for upto in (*cuts, ntokens):
            for layer in range(LAYERS):
                await asyncio.sleep(dice.uniform(0, 4) * US)
                if send.finished:
                    break
                for name, view in source.views.items():
                    if name.startswith(f"{layer}."):
                        ids = src[source.group(name)]
                        right = content(send.request, name, len(ids), source.held)
                        _fill(view, ids, right, (ntokens, upto))
                send.layer_done(layer, upto)
        await send.wait_async(PATIENCE.request_s * 4)
    source.paint(src, GARBAGE)


def _fill(view: np.ndarray, ids: list[int], right: np.ndarray, ntokens: tuple[int, int]) -> None:
    """Write what of a request's last blocks is computed up to a token."""
    total, upto = ntokens
    per = view.shape[2]
    first = max(len(ids), -(-total // per)) - len(ids)  # the list's place in the prompt
    for index, block in enumerate(ids):
        n = per if upto == total else max(0, min(per, upto - (first + index) * per))
        view[block, :, :n] = right[index, :, :n]


async def _check(sink: Rank, load: KvLoad, lists, found: Run) -> None:
    src, dst = lists
    await load.wait_async(PATIENCE.request_s * 4)
    for name, view in sink.views.items():
        group = sink.group(name)
        ids = dst[group]
        right = content(load.request, name, len(src[group]), sink.held)[
            len(src[group]) - len(ids) :
        ]
        bad = set() if load.ok else set(load.failed_blocks[group])
        for block, expected in zip(ids, right, strict=True):
            if block not in bad and (view[block] != expected).any():
                found.violations.append(f"{load.request}, {name}: block {block} is not its own")
    if load.finished:
        sink.paint(dst, PAINT)
