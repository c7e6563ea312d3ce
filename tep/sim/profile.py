"""Profiles of simulated machines: numbers of hardware, each with unit, source and confidence.

A profile is a TOML file in which every number is a table of its own; what a file with a `base` does
not say is that profile's. `profiles/README.md` says what the numbers mean and where the model is
wrong. No model lives here, and no number either.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cache
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from tep.backends.base import DomainCaps
from tep.base.errors import UsageError
from tep.base.units import PS_PER_S

__all__ = [
    "FIELDS", "Confidence", "Field", "Number", "Profile", "load_profile", "profile_names",
    "read_profile", "write_profile",
]  # fmt: skip

Confidence = Literal["measured", "quoted", "fitted", "guessed"]
"""measured: by us. quoted: from the source. fitted: to the figures named. guessed: by judgement."""

_FACTORS: Final[Mapping[str, Mapping[str, int]]] = {
    "ps": {"ps": 1, "ns": 10**3, "us": 10**6, "ms": 10**9, "s": 10**12},
    "bps": {"b/s": 1, "Gb/s": 10**9},
    "bytes": {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30},
    "count": {"1": 1},
    "ppm": {"ppm": 1, "%": 10**4},
}
"""Unit of a field -> units a file may use for it -> factor."""


class Field(NamedTuple):
    """The place of a field in the file, its unit, and the least value that makes sense."""

    path: str
    unit: str
    least: int


def _at(path: str, unit: str, least: int, *, optional: bool = False) -> int:
    """Make a field of a profile that a file has at this place; an optional one is 0 if left out."""
    where = {"field": Field(path, unit, least)}
    found: int = field(metadata=where, default=0) if optional else field(metadata=where)
    return found


_HEAD: Final = ("name", "summary", "ordered")


class Number(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number as its file states it.

    Attributes:
        value: in `unit`.
        unit: as written, e.g. "Gb/s".
        source: its origin, in words.
        confidence: measured, quoted, fitted or guessed.
    """

    value: float
    unit: str
    source: Annotated[str, msgspec.Meta(pattern=r"\S")]
    confidence: Confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A machine as the timing fabric sees it: one device's NICs, and the CPU of its worker.

    Other values than a file's: `dataclasses.replace(profile, quantum_bytes=1 << 20)`.

    Attributes:
        name: of the profile, e.g. "cx7_400".
        summary: one line for people.
        ordered: whether rows to one peer arrive in posting order.
        nics: NICs of one device.
        step_delay_ps: from a submit, or a completion, to the worker's turn.
        post_first_ps: worker's CPU time for a row to another peer than the row before it.
        post_next_ps: the same for a row to the same peer.
        turn_rows: rows the worker posts before it looks at its NICs again.
        link_bps: nominal rate of one NIC.
        wire_bps: payload that one NIC's wire really carries.
        op_ps: NIC's own time for each row, before its bytes move.
        dma_bps: rate between memory and NIC.
        fill_bytes: most bytes of a row that are in the NIC before the first one leaves.
        quantum_bytes: bytes that a NIC sends of one queue pair before it turns to the next.
        sq_depth: rows one NIC has outstanding at the most.
        max_write_bytes, max_msg_bytes: longest row and message.
        latency_ps: one way, first byte out to first byte in.
        receive_ps: last byte in to immediate visible.
        ack_ps: last byte in to completion visible at the sender; at least receive_ps.
        jitter_ps: extra delay of a row, even between 0 and this, where rows are unordered.
        peer_timeout_ps: until a row to a dead peer fails.
        tail_ppm, tail_ps: where rows are unordered: of a million so many are late, by an
            exponential time of this mean: a slow path among those that are sprayed over.
        loss_ppm, retry_ps: where rows are ordered: of a million packets so many are lost, and how
            long until one is missed; the rest of its row is sent again, and those behind it wait.
        pause_bytes: a link, a NIC's or a leaf's, sends nothing while so many bytes that passed it
            were not taken by their receivers; 0: no link pauses.
        ecn_min_bytes, ecn_bytes, ecn_ppm: a packet that finds a queue of fewer bytes than the first
            is not marked, of more than the second it is; between them it is marked by chance, which
            grows from 0 to so many of a million. ecn_bytes 0: none is marked.
        ecn_every_ps: a receiver notifies a sender of a mark at most once in this time.
        ecn_gain_ppm, ecn_fade_ps: share of the newest notice in a sender's average of them (alpha),
            and of what it loses once in each such time without one.
        ecn_recover_ps, ecn_count_bytes: a rate that was cut comes back by a step after each such
            time, and after so many bytes: to half way from where it was, and after five steps that
            is raised by ecn_grow_bps.
        poll_ps: worker's CPU time for an immediate; post_next_ps has the time for its completions.
        bus_bps: rate of the PCIe that the NICs of a node share, each way; 0: no limit.
        leaf_nodes: nodes below one leaf switch, in the order they are started; 0: all of them.
        rails: 1: leaves are rails instead: NIC k of every host is on rail k.
        host_gpus: nodes of one host, each a GPU with its NICs, in the order they are started; 0: a
            node is a host. They share nothing but rails and PCIe switches: an engine writes to the
            other GPUs of its host over NICs, too, and NVLink belongs to applications.
        switch_gpus: nodes of a host whose NICs share one PCIe switch of `bus_bps`; 0: each has its
            own.
        uplink_bps: of each leaf to the spine, and from the spine to it; 0: no limit.
        paths: links that make up uplink_bps, if more than 1: a queue pair of ordered rows keeps to
            one by a hash (ECMP); where rows are unordered (SRD) their packets are sprayed over all.
        spine_ps: the latency that the spine adds.
        numbers: field -> what the file says of it.
    """

    name: str
    summary: str
    ordered: bool
    nics: int = _at("node.nics", "count", 1)
    step_delay_ps: int = _at("cpu.step_delay", "ps", 0)
    post_first_ps: int = _at("cpu.post_first", "ps", 0)
    post_next_ps: int = _at("cpu.post_next", "ps", 0)
    turn_rows: int = _at("cpu.turn_rows", "count", 1)
    link_bps: int = _at("nic.link", "bps", 1)
    wire_bps: int = _at("nic.wire", "bps", 1)
    op_ps: int = _at("nic.op", "ps", 0)
    dma_bps: int = _at("nic.dma", "bps", 1)
    fill_bytes: int = _at("nic.fill", "bytes", 0)
    quantum_bytes: int = _at("nic.quantum", "bytes", 1)
    sq_depth: int = _at("nic.sq_depth", "count", 1)
    max_write_bytes: int = _at("nic.max_write", "bytes", 1)
    max_msg_bytes: int = _at("nic.max_msg", "bytes", 1)
    latency_ps: int = _at("wire.latency", "ps", 1)
    receive_ps: int = _at("wire.receive", "ps", 0)
    ack_ps: int = _at("wire.ack", "ps", 0)
    jitter_ps: int = _at("wire.jitter", "ps", 0)
    peer_timeout_ps: int = _at("wire.peer_timeout", "ps", 1)
    numbers: Mapping[str, Number] = field(repr=False, hash=False)
    tail_ppm: int = _at("wire.tail_share", "ppm", 0, optional=True)
    tail_ps: int = _at("wire.tail", "ps", 0, optional=True)
    loss_ppm: int = _at("wire.loss", "ppm", 0, optional=True)
    retry_ps: int = _at("wire.retry", "ps", 0, optional=True)
    pause_bytes: int = _at("wire.pause", "bytes", 0, optional=True)
    ecn_min_bytes: int = _at("wire.ecn_min", "bytes", 0, optional=True)
    ecn_bytes: int = _at("wire.ecn", "bytes", 0, optional=True)
    ecn_ppm: int = _at("wire.ecn_share", "ppm", 0, optional=True)
    ecn_every_ps: int = _at("wire.ecn_every", "ps", 0, optional=True)
    ecn_gain_ppm: int = _at("wire.ecn_gain", "ppm", 0, optional=True)
    ecn_fade_ps: int = _at("wire.ecn_fade", "ps", 0, optional=True)
    ecn_recover_ps: int = _at("wire.ecn_recover", "ps", 0, optional=True)
    ecn_count_bytes: int = _at("wire.ecn_count", "bytes", 0, optional=True)
    ecn_grow_bps: int = _at("wire.ecn_grow", "bps", 0, optional=True)
    poll_ps: int = _at("cpu.poll", "ps", 0, optional=True)
    bus_bps: int = _at("node.bus", "bps", 0, optional=True)
    leaf_nodes: int = _at("network.leaf_nodes", "count", 0, optional=True)
    rails: int = _at("network.rails", "count", 0, optional=True)
    host_gpus: int = _at("network.host_gpus", "count", 0, optional=True)
    switch_gpus: int = _at("network.switch_gpus", "count", 0, optional=True)
    uplink_bps: int = _at("network.uplink", "bps", 0, optional=True)
    paths: int = _at("network.paths", "count", 0, optional=True)
    spine_ps: int = _at("network.spine", "ps", 0, optional=True)

    def __post_init__(self) -> None:
        """Refuse what contradicts itself: UsageError with both values."""
        if self.ack_ps < self.receive_ps:
            raise UsageError(
                f"profile {self.name}: ack_ps={self.ack_ps} < receive_ps={self.receive_ps}; "
                "a sender would learn of a row before its bytes can be seen"
            )
        if self.ordered and (self.jitter_ps or self.tail_ppm):
            raise UsageError(
                f"profile {self.name}: ordered, but jitter_ps={self.jitter_ps} or "
                f"tail_ppm={self.tail_ppm} would reorder rows"
            )
        if self.ecn_bytes and not (self.ecn_recover_ps and self.ecn_grow_bps and self.ecn_fade_ps):
            raise UsageError(
                f"profile {self.name}: ecn_bytes={self.ecn_bytes}, but ecn_recover_ps="
                f"{self.ecn_recover_ps}, ecn_grow_bps={self.ecn_grow_bps} and ecn_fade_ps="
                f"{self.ecn_fade_ps}: a rate that was cut would never come back"
            )
        if self.ecn_bytes and self.ecn_min_bytes >= self.ecn_bytes:
            raise UsageError(
                f"profile {self.name}: ecn_min_bytes={self.ecn_min_bytes} >= "
                f"ecn_bytes={self.ecn_bytes}"
            )
        if self.rails not in (0, 1) or (self.rails and self.leaf_nodes):
            raise UsageError(
                f"profile {self.name}: rails={self.rails}, leaf_nodes={self.leaf_nodes}; rails 0 "
                "or 1, or leaves of so many nodes"
            )
        if self.paths and not self.uplink_bps:
            raise UsageError(
                f"profile {self.name}: paths={self.paths} share uplink_bps, which is not limited"
            )
        if self.switch_gpus and self.host_gpus % self.switch_gpus:
            raise UsageError(
                f"profile {self.name}: host_gpus={self.host_gpus} is no multiple of "
                f"switch_gpus={self.switch_gpus}; a switch is in one host"
            )
        if self.loss_ppm and not self.ordered:
            raise UsageError(
                f"profile {self.name}: loss_ppm={self.loss_ppm} is modelled for ordered rows; "
                "where paths are sprayed over, a loss is a tail"
            )

    def caps(self, nic: str, *, moves_bytes: bool, control_bytes: int) -> DomainCaps:
        """The capabilities of one NIC; one that moves no bytes takes memory of any kind."""
        return DomainCaps(
            backend="sim",
            nic=nic,
            link_bps=self.link_bps,
            sq_depth=self.sq_depth,
            max_write_bytes=self.max_write_bytes,
            max_msg_bytes=self.max_msg_bytes,
            ordered=self.ordered,
            memory_kinds=("cpu",) if moves_bytes else ("cpu", "cuda"),
            peer_timeout_s=self.peer_timeout_ps / PS_PER_S + 0.001,
            moves_bytes=moves_bytes,
            control_bytes=control_bytes,
            no_reads=f"the profile {self.name} has no source for the time that reads take",
        )


FIELDS: Final[Mapping[str, Field]] = {
    one.name: one.metadata["field"] for one in fields(Profile) if one.metadata
}
_OPTIONAL: Final = tuple(one.name for one in fields(Profile) if one.metadata and one.default == 0)
"""Fields that a file may leave out; they are 0 then."""


def profile_names() -> list[str]:
    """Names of the profiles that come with tep."""
    found = [entry.name for entry in files("tep.sim").joinpath("profiles").iterdir()]
    return sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml"))


def load_profile(name: Profile | str | PathLike[str]) -> Profile:
    """Load a profile that comes with tep, or the file of a path: what ends in .toml or has a "/".

    A Profile is returned as it is.

    Raises:
        UsageError: there is none of this name; the message lists those there are. Or the file is
            not a profile.
    """
    if isinstance(name, Profile):
        return name
    if not isinstance(name, str | PathLike):
        raise UsageError(
            f"profile {name!r} is neither a name, nor a path, nor a Profile; "
            f"names are: {', '.join(profile_names())}"
        )
    text = os.fspath(name)
    return read_profile(text) if text.endswith(".toml") or "/" in text else _shipped(text)


@cache
def _shipped(name: str) -> Profile:
    names = profile_names()
    if name not in names:
        raise UsageError(
            f"profile {name!r} is unknown; there are: {', '.join(names)}; "
            "a path to a .toml file is possible, too"
        )
    text = files("tep.sim").joinpath("profiles", f"{name}.toml").read_text(encoding="utf-8")
    return _parse(text, f"{name}.toml")


def read_profile(path: str | PathLike[str]) -> Profile:
    """Read a profile from a file of the same form as those that come with tep.

    Raises:
        UsageError: the file cannot be read, is not TOML, or lacks, exceeds or contradicts the form.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"profile {str(path)!r} cannot be read: {error.strerror}") from error
    return _parse(text, str(path))


def write_profile(profile: Profile, path: str | PathLike[str]) -> None:
    """Write a profile as a file that read_profile() reads; numbers as their `numbers` say."""
    lines = [
        f"name = {_quoted(profile.name)}",
        f"summary = {_quoted(profile.summary)}",
        f"ordered = {str(profile.ordered).lower()}",
    ]
    for name, number in profile.numbers.items():
        spec = FIELDS[name]
        exact = Fraction(getattr(profile, name), _FACTORS[spec.unit][number.unit])
        lines += [
            f"\n[{spec.path}]",
            f"value = {_decimal(exact)}",
            f"unit = {_quoted(number.unit)}",
            f"source = {_quoted(number.source)}",
            f"confidence = {_quoted(number.confidence)}",
        ]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _decimal(value: Fraction) -> str:
    """All digits of a number: units are powers of two and ten, so that they end."""
    with localcontext(prec=60):
        found = Decimal(value.numerator) / Decimal(value.denominator)
    return format(found, "f")


def _parse(text: str, where: str) -> Profile:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"profile {where}: not TOML: {error}") from error
    base = _base(where, document.pop("base", None))
    tables: dict[str, object] = {key: document.pop(key, None) for key in _HEAD}
    given: dict[str, object] = {}
    for section, content in document.items():
        if not isinstance(content, dict):
            raise UsageError(
                f"profile {where}: unknown key {section!r}; known: base, {', '.join(_HEAD)}"
            )
        given |= {f"{section}.{key}": table for key, table in content.items()}
    if base is not None and tables["ordered"] is None:
        tables["ordered"] = base.ordered
    known = {} if base is None else dict(base.numbers)
    paths = {spec.path for spec in FIELDS.values()}
    missing = [key for key, value in tables.items() if value is None]
    left_out = {FIELDS[name].path for name in {*_OPTIONAL, *known}} - set(given)
    _check_keys(where, {*given, *(_HEAD)} - {*missing}, {*paths, *_HEAD} - left_out)
    for key, value in tables.items():
        kind = bool if key == "ordered" else str
        if not isinstance(value, kind):
            raise UsageError(f"profile {where}: {key} = {value!r} is not a {kind.__name__}")
    numbers = known | {
        field: _number(f"{where}: [{spec.path}]", given[spec.path], spec.unit)
        for field, spec in FIELDS.items()
        if spec.path in given
    }
    values = {
        field: _scaled(f"{where}: [{FIELDS[field].path}]", number, FIELDS[field])
        for field, number in numbers.items()
    }
    return Profile(**tables, **values, numbers=numbers)  # type: ignore[arg-type]  # checked above


def _base(where: str, name: object) -> Profile | None:
    if name is None or name in profile_names():
        return None if name is None else _shipped(str(name))
    raise UsageError(f"profile {where}: base = {name!r} is none of {', '.join(profile_names())}")


def _check_keys(where: str, given: set[str], known: set[str]) -> None:
    unknown = sorted(given - known)
    missing = sorted(known - given)
    if unknown or missing:
        said = [f"unknown: {', '.join(unknown)}"] * bool(unknown)
        said += [f"missing: {', '.join(missing)}"] * bool(missing)
        raise UsageError(f"profile {where}: {'; '.join(said)}")


def _number(where: str, table: object, unit: str) -> Number:
    try:
        number = msgspec.convert(table, Number)
    except msgspec.ValidationError as error:
        raise UsageError(f"profile {where}: {error}") from None
    if number.unit not in _FACTORS[unit] or not math.isfinite(number.value):
        raise UsageError(
            f"profile {where}: {number.value:g} {number.unit} does not fit; a finite number, in "
            f"one of {', '.join(_FACTORS[unit])}"
        )
    return number


def _scaled(where: str, number: Number, spec: Field) -> int:
    """Bring a number to its field's unit, exactly as its decimal digits say."""
    value = Fraction(repr(number.value)) * _FACTORS[spec.unit][number.unit]
    if value.denominator != 1 or value < spec.least:
        raise UsageError(
            f"profile {where}: {number.value} {number.unit} is {float(value)} {spec.unit}; "
            f"whole numbers from {spec.least} on are possible"
        )
    return int(value)
