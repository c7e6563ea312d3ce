"""A simulated cluster: engines on nodes of one fabric, on one clock. The bridge to the engine.

Nothing is modelled here. The only room of `tep.sim` that knows `tep.engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tep.base.api import EngineOptions
from tep.base.checks import U64_MAX, check_int, check_kind, check_seconds
from tep.base.errors import UsageError
from tep.base.units import PS_PER_US
from tep.engine import TransferEngine
from tep.engine.verbs import TRACE_EVENTS_MAX
from tep.observe.trace import Trace
from tep.observe.tracing import record
from tep.sim.chaos import ChaosFabric
from tep.sim.clock import FabricEnv, in_one_process
from tep.sim.driver import SimDriver, SimNode
from tep.sim.faults import Chaos, Fault, Faults, KillNic, Restart, Revoke, node_names
from tep.sim.loop import SimLoop, current_env, run
from tep.sim.programs import Datagrams, Incarnation, Main, Program
from tep.sim.row_log import RowLog

if TYPE_CHECKING:
    from tep.sim.profile import Profile
    from tep.sim.timing import TimingFabric

    _Profiles = Profile | str | Sequence[Profile | str]

__all__ = ["Cluster"]

T = TypeVar("T")

_NICS: int = 2
_NICS_MAX: int = 64
_NODES_MAX: int = 2**16


class Cluster:
    """Engines that reach each other over a simulated fabric; use it as a context manager.

    Without a profile the fabric is the chaos fabric: correct or not is its only question, and its
    times mean nothing. With one it is the timing fabric, calibrated to published machines.
    Inside `tep.sim.run()` the cluster lives on that run's clock, else on its own.

    Args:
        nodes: how many engines.
        nics: NICs of every node, or one number a node; 2 if not said. A profile has its own.
        profile: one of `tep.sim.profiles()`, or a Profile read from a file; or one a node, of
            machines that speak to each other: EFA's, or ConnectX's. None for chaos.
        seed: of everything drawn; the same seed makes the same run, byte for byte.
        chaos: the knobs, or None to draw them from the seed.
        faults: in place of `chaos`: knobs, and faults that happen at their times.
        names: of the nodes; None: "a", "b", ...
        options: of every engine.
        row_log: log every row of the fabric, for the attribute of this name.
        move_bytes: False, with a profile only: keep time and count, and copy nothing.
        mortal: with a profile only: its NICs can die (`kill_nic`), and the engines make good what
            is lost. It costs control messages in simulated time.

    Attributes:
        engines: one a node, in order; restart() replaces one.
        env: the clock; a simpy environment for processes beside the engines.
        fabric: the chaos or timing fabric underneath.
        row_log: every row on the fabric; reading it is a UsageError unless it was asked for.
        happened: the faults so far, in order: those of calls, those at times, and those that the
            fabric's own load brought about.

    Raises:
        UsageError: numbers that contradict each other, an unknown profile, profiles of machines
            that cannot speak to each other, chaos with a profile.
    """

    def __init__(
        self,
        nodes: int = 2,
        nics: int | Sequence[int] | None = None,
        profile: _Profiles | None = None,
        seed: int = 0,
        chaos: Chaos | None = None,
        faults: Faults | None = None,
        names: Sequence[str] | None = None,
        options: EngineOptions = EngineOptions(),
        row_log: bool = False,
        move_bytes: bool = True,
        mortal: bool = False,
    ) -> None:
        nodes = check_int("Cluster: nodes", nodes, 1, _NODES_MAX)
        seed = check_int("Cluster: seed", seed, 0, U64_MAX)
        check_kind("Cluster: options", options, EngineOptions)
        self._call = f"nodes={nodes}, nics={nics!r}, profile={profile!r}, seed={seed}"
        self._call += f", chaos={chaos!r}, names={names!r}, options={options!r}"
        self._call += f", move_bytes={move_bytes}, mortal={mortal}"
        if faults is not None:
            self._call += f", faults={faults!r}"
            if chaos is not None:
                raise UsageError("Cluster: chaos or faults, not both; faults has the knobs too")
            chaos = faults.chaos
        self._names = node_names(nodes) if names is None else tuple(names)
        if len(self._names) != nodes:
            raise UsageError(f"Cluster: {len(self._names)} names for {nodes} nodes")
        counts = _counts(nodes, nics)
        _check_kind_of_fabric(nodes, profile, chaos, nics, move_bytes, mortal)
        self._options = options
        knobs = None if profile is not None else chaos or Chaos.draw(seed)
        self.env = current_env() or FabricEnv()
        self.row_log = RowLog(on=row_log)
        self._tracing: list[Trace] = []
        self.happened: list[Fault] = []
        self._datagrams: Datagrams | None = None
        self._lives: dict[str, Incarnation] = {}
        self._programs: defaultdict[str, list[Program[Any]]] = defaultdict(list)
        self.fabric: ChaosFabric | TimingFabric
        if knobs is not None:
            self.fabric = chaotic = ChaosFabric(self.env, knobs, row_log=self.row_log)
            chaotic.happened = self.happened
        else:
            from tep.sim.timing import TimingFabric  # numpy models: only if a profile is given

            assert profile is not None
            self.fabric = TimingFabric(
                self.env,
                profile,
                seed=seed,
                row_log=self.row_log,
                move_bytes=move_bytes,
                mortal=mortal,
            )
        self.engines = [self._open(node) for node in self._make_nodes(counts, profile)]
        for t_ps, fault in faults.events if faults is not None else ():
            self.env.call_at(self.env.now + t_ps, self._inflict, fault)

    def _make_nodes(self, counts: list[int], profile: _Profiles | None) -> Sequence[SimNode]:
        fabric, names = self.fabric, self._names
        if isinstance(fabric, ChaosFabric):
            return [fabric.node(*pair) for pair in zip(names, counts, strict=True)]
        machines = profile if isinstance(profile, list | tuple) else [None] * len(names)
        return [fabric.node(*pair) for pair in zip(names, machines, strict=True)]

    def _open(self, node: SimNode) -> TransferEngine:
        driver = SimDriver(self.env, node)
        engine = TransferEngine(
            node.domains, driver=driver, name=node.name, epoch=node.epoch, options=self._options
        )
        for found in self._tracing:
            found.stops.append(record(engine._machine, found))
        return engine

    def trace(self, *, events_max: int = TRACE_EVENTS_MAX) -> Trace:
        """Record all engines, also those that restart, until `stop()` of the result.

        As `TransferEngine.trace`, in simulated time.
        """
        found = Trace("simulated", check_int("trace: events_max", events_max, 1))
        found.stops.append(lambda: self._tracing.remove(found))
        self._tracing.append(found)
        for engine in self.engines:
            found.stops.append(record(engine._machine, found))
        return found

    # ------------------------------------------------------------------ time

    @property
    def now_us(self) -> float:
        """Simulated microseconds since the clock began."""
        return self.env.now / PS_PER_US

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this cluster's simulated time; as tep.sim.run()."""
        __tracebackhide__ = True
        return run(main, self.env)

    def at(self, us: float, event: Fault | Callable[[], object]) -> None:
        """Have a fault, or a call, happen `us` simulated microseconds after the clock began."""
        us = check_seconds("at: us", us)  # of any unit: a time from 0 on
        t_ps = round(us * PS_PER_US)
        if t_ps < self.env.now:
            raise UsageError(f"at({us}): the clock stands at {self.now_us} us already")
        if callable(event):
            self.env.call_at(t_ps, lambda _: event())
        else:
            self._chaos("at() with a fault")
            self.env.call_at(t_ps, self._inflict, event)

    # ------------------------------------------------------------------ programs

    def spawn(self, node: int | str, main: Main[T]) -> asyncio.Future[T]:
        """Run a program on a node: it ends with a crash of the node, and starts again after it.

        Only inside of `run()`. A crash cancels the program's task, which should hold all it started
        (asyncio.gather and TaskGroup do); what it does then reaches nobody any more. A program that
        has returned is not started again.

        Args:
            node: name or number.
            main: an async function of an Incarnation, which is one life of the node: its engine,
                datagrams, timers, and a disk that outlives crashes.

        Returns:
            What the program returns. If it raises, that goes to whoever awaits this, else it ends
            the run.
        """
        if current_env() is not self.env:
            raise UsageError("spawn(): only inside of the coroutine that cluster.run() is given")
        if not inspect.iscoroutinefunction(main):
            raise UsageError(
                f"spawn({node!r}, {main!r}): an async function of an Incarnation is needed, not a "
                "coroutine, since it is called again after a crash"
            )
        name = self._name(node)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        program = Program(main, loop)
        if name not in self._lives:
            self._live(name)
        program.start(self._lives[name])
        self._programs[name].append(program)
        return program.end

    def _live(self, name: str) -> None:
        """Begin a life of a node: its programs start, with what its disk held at the crash."""
        engine = self.engines[self._names.index(name)]
        me = Incarnation(name, engine, self.env, lambda: self.datagrams)
        if name in self._lives:
            me.disk.update(self._lives[name].disk)
        self._lives[name] = me
        for program in self._programs[name]:
            program.start(me)

    # ------------------------------------------------------------------ faults

    def kill_nic(self, node: int | str, nic: int) -> None:
        """Kill one NIC for good: rows on it end NIC_DOWN, rows towards it UNREACHABLE.

        Raises:
            UsageError: no such NIC, or the cluster has a profile and is not mortal.
        """
        name = self._name(node)
        fault = KillNic(name, self._nic(name, nic))
        if isinstance(self.fabric, ChaosFabric):
            self.fabric.inflict(fault)
        else:
            self.fabric.kill_nic(name, fault.nic)
        self.happened.append(fault)

    def revoke(self, node: int | str, nic: int | None = None) -> None:
        """Lose the registrations of one NIC, or of all NICs, of a node."""
        name = self._name(node)
        number = None if nic is None else self._nic(name, nic)
        self._chaos("revoke()").inflict(Revoke(name, number))
        self.happened.append(Revoke(name, number))

    def slow_down(self, node: int | str, nic: int, times: float) -> None:
        """Let one NIC take `times` as long for every byte from now on, both ways; with a profile.

        1 makes it sound again. On the chaos fabric, which knows no rates, see `tep.sim.Slow`.

        Raises:
            UsageError: there is no such NIC, times < 0.01, or the cluster has no profile.
        """
        name = self._name(node)
        if isinstance(self.fabric, ChaosFabric):
            raise UsageError(
                "slow_down(): the chaos fabric has no rates; open the Cluster with a profile"
            )
        self.fabric.slow_down(name, self._nic(name, nic), times)

    def restart(self, node: int | str) -> TransferEngine:
        """Crash a node and start it again; return the engine of its new incarnation.

        The old engine is closed, so that what waits for it gets a ClosedError. The new one has a
        later epoch, no regions and no peers. The node's programs (`spawn`) start again.
        """
        name = self._name(node)
        index = self._names.index(name)
        reborn = self._chaos("restart()").restart(name)
        self.happened.append(Restart(name))
        if self._datagrams is not None:
            self._datagrams.forget(name)
        if name in self._lives:
            self._lives[name].alive = False
        for program in self._programs[name]:
            program.crash()
        self.engines[index].close()
        self.engines[index] = self._open(reborn)
        if name in self._lives:
            self._live(name)
        return self.engines[index]

    def heal(self) -> None:
        """End all troubles of links and workers, now and for good; the dead stay dead.

        Faults booked with at(), or by `faults`, do not happen any more; kill_nic(), revoke() and
        restart() still do what they say.
        """
        self._chaos("heal()").heal()

    @property
    def datagrams(self) -> Datagrams:
        """Datagrams between nodes, outside the engines; they are fast, and not reliable."""
        if self._datagrams is None:
            self._datagrams = Datagrams(self._chaos("datagrams"))
        return self._datagrams

    def _inflict(self, fault: Fault) -> None:
        fabric = self._chaos("at() with a fault")
        if fabric.healed:
            return
        if isinstance(fault, Restart):
            self.restart(fault.node)
        else:
            self.happened.append(fault)
            fabric.inflict(fault)

    def _chaos(self, what: str) -> ChaosFabric:
        if not isinstance(self.fabric, ChaosFabric):
            raise UsageError(
                f"{what}: faults are the chaos fabric's; open the Cluster without profile"
            )
        return self.fabric

    def _name(self, node: int | str) -> str:
        if isinstance(node, str) and node in self._names:
            return node
        if isinstance(node, int) and 0 <= node < len(self._names):
            return self._names[node]
        raise UsageError(f"no node {node!r}; there are: {', '.join(self._names)}")

    def _nic(self, name: str, nic: int) -> int:
        engine = self.engines[self._names.index(name)]
        count = len(engine.main_address.domains)
        return check_int(f"node {name!r}: nic", nic, 0, count - 1, UsageError)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Close every engine. Idempotent; the clock and the row log can still be read."""
        with contextlib.ExitStack() as stack:  # one that fails must not leave the others open
            for engine in reversed(self.engines):
                stack.callback(engine.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(f"the same cluster again: {self!r}")
        self.close()

    __reduce__ = in_one_process

    def __repr__(self) -> str:
        return f"tep.sim.Cluster({self._call}, row_log={self.row_log.on})"


def _check_kind_of_fabric(
    nodes: int,
    profile: _Profiles | None,
    chaos: Chaos | None,
    nics: int | Sequence[int] | None,
    move_bytes: bool,
    mortal: bool,
) -> None:
    """Refuse options of one fabric for the other, and profiles of more or fewer nodes."""
    if isinstance(profile, list | tuple) and len(profile) != nodes:
        raise UsageError(f"Cluster: {len(profile)} profiles for {nodes} nodes; one a node")
    if profile is not None and (chaos is not None or nics is not None):
        raise UsageError(
            f"Cluster(profile={profile!r}): a profile has its own NICs and no chaos; "
            "leave out nics and chaos, or the profile"
        )
    if profile is None and mortal:
        raise UsageError("Cluster(mortal=True): the NICs of the chaos fabric always are")
    if profile is None and not move_bytes:
        raise UsageError("Cluster(move_bytes=False): the chaos fabric always moves bytes")


def _counts(nodes: int, nics: int | Sequence[int] | None) -> list[int]:
    if nics is None:
        return [_NICS] * nodes
    if not isinstance(nics, list | tuple):
        return [check_int("Cluster: nics", nics, 1, _NICS_MAX)] * nodes
    nics = [check_int("Cluster: nics", n, 1, _NICS_MAX) for n in nics]
    if len(nics) != nodes:
        raise UsageError(
            f"Cluster: nics={nics} are the counts of {len(nics)} nodes, but nodes={nodes}"
        )
    return list(nics)
