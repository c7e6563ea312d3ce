"""Cases: the hostile little worlds that a user's protocol is run in. Data and its drawing only.

`tep.testing.hunting` plays them. A case is a function of a seed and of the shape asked for;
`scenarios` has Hypothesis leave out of it what does not matter. It prints as a literal, and
`Case.parse` reads that back.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, get_args

from tep.base.checks import check_int, check_seconds, shown
from tep.base.errors import UsageError
from tep.base.hashing import below, draw, stream_key
from tep.base.units import PS_PER_US
from tep.sim.draws import Stream
from tep.sim.faults import Chaos, Fault, Faults, node_names

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["HEAL_US", "Case", "Record", "Violation", "scenarios"]

HEAL_US: Final = 40.0
"""When the safety phase ends: some twenty undisturbed transfers of the chaos fabric."""

_FAULT_PS: Final = (2 * PS_PER_US, 4 * PS_PER_US, 12 * PS_PER_US)
_NICS: Final = 1 << 20  # entities of the draws of NIC counts

Nics = int | tuple[int, int]


class Record(Protocol):
    """One run as frozen data: a Case, or what an engine's own tests draw; `shrink` reduces it."""

    @property
    def chaos(self) -> Chaos: ...

    @property
    def events(self) -> tuple[tuple[int, Fault], ...]:
        """The faults, each with its time in ps."""
        ...

    def with_chaos(self, chaos: Chaos) -> Self:
        """Return the same run with other knobs."""
        ...


class Violation(AssertionError):
    """A promise was broken; the message ends with the line that plays the run again.

    Attributes:
        case: the run in which it was found; None if that is not known.
        again: runs a case as this one was run; None if nobody can.
        stood: where each task of the protocol stood, a line each.
    """

    def __init__(
        self,
        what: str,
        case: Record | None = None,
        again: Callable[..., object] | None = None,
        stood: Sequence[str] = (),
    ) -> None:
        super().__init__(what)
        self.case = case
        self.again = again
        self.stood = tuple(stood)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of a protocol: who is there, and what happens to them.

    Attributes:
        nics: NICs of each node, in order; nodes are called "a", "b", ...
        faults: the fabric's knobs and seed, and faults at times.
        heal_us: when all trouble ends, and the protocol has to come to an end.
        drawn: the flags of `tep sim` that draw it again, or "" if it was not drawn.
    """

    nics: tuple[int, ...]
    faults: Faults = field(default_factory=Faults)
    heal_us: float = HEAL_US
    drawn: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.nics, tuple) or not self.nics:
            text = (
                f"Case: nics={shown(self.nics)}: a tuple of each node's number, 1 to 64, is needed"
            )
            raise UsageError(text)
        counts = tuple(check_int("Case: nics", count, 1, 64, UsageError) for count in self.nics)
        heal_us = check_seconds("Case: heal_us", self.heal_us)  # of any unit: a time from 0 on
        object.__setattr__(self, "nics", counts)  # plain: numpy's do not print as literals
        object.__setattr__(self, "heal_us", heal_us)
        nodes = node_names(len(self.nics))
        for _, fault in self.faults.events:
            if fault.node not in nodes:
                raise UsageError(f"Case: {fault} names no node; there are: {', '.join(nodes)}")

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.nics)

    @property
    def chaos(self) -> Chaos:
        """The fabric's knobs."""
        return self.faults.chaos

    @property
    def events(self) -> tuple[tuple[int, Fault], ...]:
        """The faults, each with its time in ps."""
        return self.faults.events

    @property
    def seed(self) -> int:
        """The seed of everything the fabric draws."""
        return self.faults.chaos.seed

    @property
    def may_fail(self) -> bool:
        """True if anything in it makes a transfer or message of a correct engine fail."""
        chaos = self.faults.chaos
        harm = chaos.cq_depth or chaos.message_loss or chaos.datagram_loss or chaos.odd_errors
        harm = harm or chaos.post_fails or chaos.connect_fails or chaos.register_fails
        harm = harm or chaos.fence_fails
        return bool(harm or self.faults.events or chaos.rnr_retries >= 0)

    @classmethod
    def draw(
        cls,
        seed: int,
        *,
        nodes: int = 2,
        nics: Nics = (1, 4),
        faults: str | Sequence[str] = "all",
        heal_us: float = HEAL_US,
    ) -> Case:
        """Draw one case.

        Args:
            seed: 0 or more.
            nodes: how many.
            nics: of each node, or the least and the most that may be drawn for one.
            faults: groups of faults, as `tep.sim.faults.groups_of` reads them: "all", "none", or
                names like "order nics links".
            heal_us: when trouble ends.
        """
        seed = check_int("Case: seed", seed, 0, 2**63 - 1)
        nodes = check_int("Case: nodes", nodes, 1, 2**16)
        heal_us = check_seconds("Case: heal_us", heal_us)
        least, most = nics_range(nics)
        key = stream_key(seed, Stream.SCENARIO)
        counts = tuple(
            least + below(draw(key, _NICS + node), most - least + 1) for node in range(nodes)
        )
        names = dict(zip(node_names(nodes), counts, strict=True))
        span_ps = _FAULT_PS[below(draw(key, _NICS - 1), len(_FAULT_PS))]
        drawn = Faults.draw(seed, names, kinds=faults, to_ps=span_ps)
        flags = f"--seed {seed} {shape_text(nodes, nics, faults)}"
        flags += "" if heal_us == HEAL_US else f" --heal-us {heal_us}"
        return cls(nics=counts, faults=drawn, heal_us=heal_us, drawn=flags)

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read a case from what `repr` printed. Nothing else is executed.

        Raises:
            UsageError: it is no such literal.
        """
        try:
            found = _value(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, TypeError, ValueError, AssertionError) as error:
            raise UsageError(f"{text[:200]!r} is no Case: {error}") from None
        if not isinstance(found, Case):
            raise UsageError(f"{text[:200]!r} is no Case")
        return found

    def without_events(self) -> Case:
        """The same, and nothing breaks: what goes wrong then, disorder alone has done."""
        return replace(self, faults=replace(self.faults, events=()), drawn="")

    def with_chaos(self, chaos: Chaos) -> Case:
        """Return the same case with other knobs."""
        return replace(self, faults=replace(self.faults, chaos=chaos), drawn="")

    def __repr__(self) -> str:
        heal = "" if self.heal_us == HEAL_US else f", heal_us={self.heal_us!r}"
        faults = f"Faults({self.faults.events!r}, {_knobs_text(self.faults.chaos)})"
        return f"Case(nics={self.nics!r}, faults={faults}{heal})"

    def _repr_pretty_(self, printer: Any, *_: object) -> None:
        """Print a line where Hypothesis would print each field."""
        printer.text(repr(self))


def scenarios(
    nodes: int = 2, nics: Nics = (1, 4), faults: str | Sequence[str] = "all"
) -> SearchStrategy[Case]:
    """Cases for `run()`, for Hypothesis: those of the seeds, with some of their trouble left out.

    A failing case shrinks to few faults, and a tame fabric but for the knobs that matter. Seeds
    find faster; these explain better.

    Args:
        nodes: how many nodes.
        nics: of each node, or the least and the most.
        faults: groups of faults: "all", "none", or names like "order nics links".

    Raises:
        UsageError: no such group, or no such number of NICs.
    """
    from hypothesis import strategies as st

    calm = Chaos.calm()
    names = [knob.name for knob in fields(Chaos) if knob.name != "seed"]
    Case.draw(0, nodes=nodes, nics=nics, faults=faults)  # refuses here what it refuses

    def kept(draw: DrawFn) -> bool:
        return bool(draw(st.integers(0, 7)))  # shrinks to what is left out

    @st.composite
    def cases(draw: DrawFn) -> Case:
        seed = draw(st.integers(0, 2**32 - 1))
        case = Case.draw(seed, nodes=nodes, nics=nics, faults=faults)
        events = tuple(event for event in case.events if kept(draw))
        knobs = {name: getattr(case.chaos, name) for name in names}
        odd = {k: v for k, v in knobs.items() if v != getattr(calm, k) and kept(draw)}
        fewer = replace(case, faults=Faults(events, Chaos.calm(seed, **odd)), drawn="")
        return case if case == fewer else fewer

    return cases()


def nics_range(nics: Nics) -> tuple[int, int]:
    """The least and the most NICs of a node. Raises UsageError."""
    span = nics if isinstance(nics, tuple | list) else (nics, nics)
    found = [check_int("nics", count, 1, 64, UsageError) for count in span]
    if len(found) != 2 or found[0] > found[1]:
        raise UsageError(f"nics={shown(nics)}: a number, or (least, most), from 1 to 64")
    return found[0], found[1]


def shape_text(nodes: int, nics: Nics, faults: str | Sequence[str]) -> str:
    """The flags of `tep sim` that stand for a shape."""
    least, most = nics_range(nics)
    groups = faults if isinstance(faults, str) else ",".join(faults)
    span = f"{least}" if least == most else f"{least}-{most}"
    return f"--nodes {nodes} --nics {span} --faults {','.join(groups.replace(',', ' ').split())}"


def _knobs_text(chaos: Chaos) -> str:
    """Name the differences from a calm fabric: in a shrunk case, only these matter."""
    calm = Chaos.calm()
    knobs = [(f.name, getattr(chaos, f.name)) for f in fields(chaos)]
    odd = ", ".join(f"{k}={v!r}" for k, v in knobs if v != getattr(calm, k))
    return f"Chaos.calm({odd})"


_RECORDS: Final[dict[str, Any]] = {"Chaos.calm": Chaos.calm} | {
    kind.__name__: kind for kind in (Case, Chaos, Faults, *get_args(Fault))
}


def _value(node: ast.expr) -> Any:
    """Evaluate literals and calls of our own records."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name not in _RECORDS:
            raise ValueError(f"{name} is no record")
        keywords = {word.arg: _value(word.value) for word in node.keywords if word.arg}
        return _RECORDS[name](*map(_value, node.args), **keywords)
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    return ast.literal_eval(node)
