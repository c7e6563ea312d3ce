"""Fit a profile of the timing fabric to measured throughputs: `tep sim fit`.

The shipped profiles come from this program and the published points. It solves for the four numbers
that point-to-point throughput can determine, and takes all others from a base profile. The model is
one pair of idle nodes in closed form; tests hold it against whole engines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tep.base.errors import UsageError
from tep.base.units import PS_PER_S
from tep.observe.shown import Shown
from tep.sim.profile import FIELDS, Number, Profile

__all__ = ["Fit", "Measured", "fit", "left_out", "model_gbps", "read_results"]

RUN_PAGES: Final = 16_384
"""Pages of a run; its start and end are a thousandth of it."""

_PULL: Final = 1e-3
"""The weight of a number's guess: it decides only if the points say nothing."""

_SHARE_BYTES: Final = 8192  # of a write that is shared by NICs, each gets this at the least
_STEPS_MAX: Final = 200
_SHIFT: Final = 1e-4  # of a logarithm, for a derivative
_NUDGE: Final = 0.05
_UNSEEN: Final = 5e-3
"""A number that changes no point by this part of its own change is not determined by the points."""

Floats = npt.NDArray[np.float64]


class Measured(NamedTuple):
    """One measurement between two idle nodes.

    Attributes:
        kind: "single": one write outstanding at a time. "paged": a long run of page writes.
        nbytes: of the write, or of a page.
        gbps: throughput, Gb/s, over all NICs of the device.
        nics: so many; 0: those of the base profile.
    """

    kind: str
    nbytes: int
    gbps: float
    nics: int = 0


@dataclass(frozen=True, slots=True)
class Fit(Shown):
    """The result of a fit.

    Attributes:
        profile: the base with the fitted numbers, which name the measurements as their source.
        residuals: model over measured, less one, of each point.
        errors: relative standard error of each fitted number, by field; None: no error is
            known, as there are as many numbers as points.
        kept: fields that the points do not determine; they are guesses.
    """

    profile: Profile
    points: tuple[Measured, ...]
    residuals: tuple[float, ...]
    errors: Mapping[str, float | None]
    kept: tuple[str, ...]

    def __repr__(self) -> str:
        worst = max(map(abs, self.residuals))
        return f"Fit({self.profile.name}: {len(self.points)} points, off by {worst:.1%} at most)"

    def table(self) -> list[dict[str, str | int | float]]:
        """Return a row a point."""
        return [
            {
                "kind": point.kind,
                "size, bytes": point.nbytes,
                "measured, Gb/s": point.gbps,
                "fitted, Gb/s": point.gbps * (1 + residual),
            }
            for point, residual in zip(self.points, self.residuals, strict=True)
        ]


def model_gbps(profile: Profile, point: Measured) -> float:
    """Predict a measurement as the timing fabric does, in closed form."""
    nbytes, nics = point.nbytes, profile.nics
    if point.kind == "single":
        nics = max(1, min(nics, nbytes // _SHARE_BYTES))  # as the engine shares it out
        nbytes = -(-nbytes // nics)
    fixed: float = 2 * profile.step_delay_ps + profile.latency_ps + profile.ack_ps
    fixed += (
        profile.post_first_ps + min(nbytes, profile.fill_bytes) * 8 * PS_PER_S / profile.dma_bps
    )
    wire = nbytes * 8 * PS_PER_S / profile.wire_bps
    dma = profile.op_ps + nbytes * 8 * PS_PER_S / profile.dma_bps
    if point.kind == "single":
        # Each NIC's jitter is even between 0 and its most; the last of them counts. The turn that
        # the first completion causes sees those of the others that come before it.
        later = (nics - 1) * profile.post_first_ps
        fixed += later if later > profile.step_delay_ps else 0
        took = fixed + profile.jitter_ps * nics / (nics + 1) + max(wire, dma)
        return point.nbytes * 8 / took * 1000
    page = max(profile.post_next_ps, dma / nics, wire / nics)
    return RUN_PAGES * nbytes * 8 / (fixed + RUN_PAGES * page) * 1000


def fitted_fields(base: Profile) -> tuple[str, ...]:
    """The numbers that throughput determines; small pages are limited by the CPU or by the NIC."""
    small = "post_next_ps" if base.post_next_ps > base.op_ps else "op_ps"
    return ("wire_bps", small, "fill_bytes", "ack_ps")


def _start(base: Profile, fields: Sequence[str]) -> Floats:
    """Guess a start, independent of the base's own fitted numbers.

    A number that the points do not determine stays near its guess: no point left out leaks back.
    """
    guesses = {
        "wire_bps": 0.9 * base.link_bps,
        "op_ps": base.post_first_ps / 2,
        "post_next_ps": base.post_first_ps,
        "fill_bytes": 2 * base.quantum_bytes,
        "ack_ps": base.latency_ps,
    }
    return np.log([max(1.0, guesses[name]) for name in fields])


def fit(
    points: Iterable[Measured],
    base: Profile,
    *,
    source: str = "measured points",
    held: Collection[str] = (),
) -> Fit:
    """Fit a profile: least squares of the relative error.

    Args:
        points: measured; of several sizes and both kinds, or some numbers stay the base's.
        base: the machine's kind; gives all other numbers, but NICs where the points have theirs.
        source: the origin that the fitted numbers state.
        held: fields that stay the base's.

    Raises:
        UsageError: no points, or one that cannot be.
    """
    given = tuple(points)
    for point in given:
        if point.kind not in {"single", "paged"} or point.nbytes < 1 or not point.gbps > 0:
            raise UsageError(f"fit: {point} is no measurement: kind, bytes and Gb/s above 0")
    if not given:
        raise UsageError("fit: no points")
    counts = {point.nics for point in given} - {0}
    if len(counts) > 1:
        raise UsageError(f"fit: points of {sorted(counts)} NICs; a machine has one number of them")
    base = dataclasses.replace(base, nics=max(counts, default=base.nics))
    fields = tuple(name for name in fitted_fields(base) if name not in held)
    values = _solve(given, base, fields, _start(base, fields))
    seen = [k for k in range(len(fields)) if _is_seen(given, base, fields, values, k)]
    found = _with(base, fields, values)
    residuals = _residuals(given, base, fields, values)
    errors = _errors(_jacobian(given, base, fields, values)[:, seen], residuals)
    worst = float(np.abs(residuals).max())
    said = f"{source}; fitted to {len(given)} points, worst residual {worst:.1%}"
    numbers = dict(found.numbers)
    for k, name in enumerate(fields):
        number = _number(name, getattr(found, name), said)
        if k not in seen:
            guess = f"not seen in {source}"
            number = msgspec.structs.replace(number, source=guess, confidence="guessed")
        numbers[name] = number
    profile = dataclasses.replace(found, numbers=numbers)
    return Fit(
        profile,
        given,
        tuple(residuals.tolist()),
        {fields[k]: error for k, error in zip(seen, errors)},
        tuple(name for k, name in enumerate(fields) if k not in seen),
    )


def left_out(points: Sequence[Measured], base: Profile) -> list[float]:
    """Each point as the fit to all others predicts it, in Gb/s."""
    return [
        model_gbps(fit([*points[:k], *points[k + 1 :]], base).profile, point)
        for k, point in enumerate(points)
    ]


def _with(base: Profile, fields: Sequence[str], values: Floats) -> Profile:
    whole = {name: round(float(value)) for name, value in zip(fields, np.exp(values))}
    whole["ack_ps"] = max(whole.get("ack_ps", base.ack_ps), base.receive_ps)
    return dataclasses.replace(base, **whole)  # type: ignore[arg-type]  # all of them are integers


def _residuals(
    points: Sequence[Measured], base: Profile, fields: Sequence[str], values: Floats
) -> Floats:
    profile = _with(base, fields, values)
    return np.array([model_gbps(profile, point) / point.gbps - 1 for point in points])


def _is_seen(
    points: Sequence[Measured], base: Profile, fields: Sequence[str], values: Floats, k: int
) -> bool:
    """Whether the points hold a number from both sides; a limit that nothing reaches is not."""
    now = _residuals(points, base, fields, values)
    moves = []
    for shift in (-_NUDGE, _NUDGE):
        moved = values.copy()
        moved[k] += shift
        moves.append(np.abs(_residuals(points, base, fields, moved) - now).max() / _NUDGE)
    return bool(min(moves) > _UNSEEN)


def _jacobian(
    points: Sequence[Measured], base: Profile, fields: Sequence[str], values: Floats
) -> Floats:
    """The change of each residual with the logarithm of each number."""
    columns = []
    for k in range(len(fields)):
        pair = []
        for sign in (1, -1):
            moved = values.copy()
            moved[k] += sign * _SHIFT
            pair.append(_residuals(points, base, fields, moved))
        columns.append((pair[0] - pair[1]) / (2 * _SHIFT))
    return np.stack(columns, axis=1)


def _solve(
    points: Sequence[Measured],
    base: Profile,
    fields: Sequence[str],
    values: Floats,
) -> Floats:
    """Levenberg and Marquardt's steps down from a start."""
    damping, begun, held = 1e-2, values, _PULL * np.eye(len(fields))
    now = _residuals(points, base, fields, values)
    now = np.concatenate((now, np.zeros(len(fields))))
    for _ in range(_STEPS_MAX):
        slope = np.concatenate((_jacobian(points, base, fields, values), held))
        square = slope.T @ slope
        wanted = square + damping * (np.diag(np.diag(square)) + 1e-9 * np.eye(len(fields)))
        step = np.clip(np.linalg.solve(wanted, -slope.T @ now), -0.5, 0.5)
        tried = values + step
        then = _residuals(points, base, fields, tried)
        then = np.concatenate((then, held @ (tried - begun)))
        if then @ then < now @ now:
            gained = float(now @ now - then @ then)
            values, now, damping = tried, then, damping / 3
            if gained < 1e-12:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return values


def _errors(slope: Floats, residuals: Floats) -> list[float | None]:
    """Relative standard errors of the fitted numbers; None where no point is left over."""
    spare = len(residuals) - slope.shape[1]
    if spare < 1:
        return [None] * slope.shape[1]
    variance = float(residuals @ residuals) / spare
    spread = np.sqrt(np.diag(np.linalg.pinv(slope.T @ slope)) * variance)
    return [float(value) for value in spread]


def _number(field: str, value: int, source: str) -> Number:
    """A number as a file would state it, in the unit that suits the field."""
    unit, factor = {
        "bps": ("Gb/s", 10**9),
        "ps": ("ns", 10**3),
        "bytes": ("KiB", 2**10),
        "count": ("1", 1),
    }[FIELDS[field].unit]
    return Number(value / factor, unit, source, "fitted")


class _Entry(msgspec.Struct):
    """One point of a file of measurements."""

    kind: str
    bytes: int
    gbps: float
    nics: int = 0


class _Results(msgspec.Struct):
    """A file of measurements with other things beside them."""

    points: list[_Entry]


def read_results(path: Path) -> list[Measured]:
    """Read measurements from JSON: a list of kind, bytes, gbps and nics, or {"points": list}.

    Raises:
        UsageError: the file cannot be read or is something else; names the entry.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Results | list[_Entry])
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: points of kind, bytes and gbps are asked for: {error}") from None
    points = found.points if isinstance(found, _Results) else found
    if not points:
        raise UsageError(f"{path}: no points; each needs kind, bytes and gbps")
    return [Measured(one.kind, one.bytes, one.gbps, one.nics) for one in points]
