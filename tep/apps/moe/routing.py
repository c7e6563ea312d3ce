"""Computes places from routes: the token copies between each two ranks, and where each lands. Pure.

A *copy* is one (token, expert) pair. A group's copies are ordered by expert, then token, so that
those for one rank, and for one expert, stand together: a block. Rule 1: every place is a function
of the routes alone (counts of copies by group and expert), so all ranks compute the same.
Rule 2: how many immediates a rank counts is computed from the routes too, never measured.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tep import BadRequest
from tep.apps.moe.config import MoeConfig

__all__ = ["NOWHERE", "Arrivals", "Batch", "Ints", "Routes", "private_limits", "sort_copies"]

Ints = npt.NDArray[np.int64]

NOWHERE: Final = -1
"""An index that chooses no expert."""


class Batch(NamedTuple):
    """The copies of one group's tokens, in sending order.

    Attributes:
        tokens: i64[copies], token of each copy.
        slots: i64[copies], which of the token's R choices it is.
        experts: i64[copies].
        counts: i64[E], copies of each expert.
        place: i64[n, R], position of each choice in sending order, or NOWHERE.
    """

    tokens: Ints
    slots: Ints
    experts: Ints
    counts: Ints
    place: Ints


def sort_copies(
    indices: npt.NDArray[np.integer], config: MoeConfig, alive: npt.NDArray[np.bool_] | None = None
) -> Batch:
    """Order the copies of a batch by expert, then token.

    Args:
        indices: int[n, R], expert of each choice, or NOWHERE; a token's choices are distinct.
        config: of the all-to-all.
        alive: bool[world]; choices of a dead rank's experts are dropped. None: all live.

    Raises:
        BadRequest: wrong shape, too many tokens, an unknown expert, or one chosen twice.
    """
    found = np.asarray(indices)
    if found.ndim != 2 or found.shape[1] != config.topk or found.dtype.kind not in "iu":
        raise BadRequest(
            f"indices of shape {found.shape} {found.dtype}; integers [tokens, {config.topk}]"
        )
    if len(found) > config.max_tokens:
        raise BadRequest(f"{len(found)} tokens, but max_tokens={config.max_tokens}")
    chosen = found.astype(np.int64)
    if chosen.size and not NOWHERE <= int(chosen.min()) <= int(chosen.max()) < config.num_experts:
        raise BadRequest(
            f"indices from {int(chosen.min())} to {int(chosen.max())}; experts are 0 to "
            f"{config.num_experts - 1}, and {NOWHERE} is none"
        )
    _refuse_twice(chosen)
    used = chosen != NOWHERE
    if alive is not None and not alive.all():
        used &= alive[np.maximum(chosen, 0) // config.local_experts]
    tokens, slots = np.nonzero(used)
    experts = chosen[tokens, slots]
    order = np.argsort(experts, kind="stable")
    tokens, slots, experts = tokens[order], slots[order], experts[order]
    place = np.full(chosen.shape, NOWHERE, np.int64)
    place[tokens, slots] = np.arange(len(order))
    counts = np.bincount(experts, minlength=config.num_experts)
    return Batch(tokens, slots, experts, counts, place)


def _refuse_twice(chosen: Ints) -> None:
    ordered = np.sort(chosen, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NOWHERE)
    if twice.any():
        token, at = (int(found[0]) for found in np.nonzero(twice))
        raise BadRequest(f"token {token} chooses expert {int(ordered[token, at])} more than once")


class Arrivals(NamedTuple):
    """Every copy that one rank gets, in the order of its output: by expert, group, position.

    Attributes:
        group: i64[copies], where it comes from.
        place: i64[copies], position among the copies from that group to this rank.
        row: i64[copies], where it stands in the padded output.
        counts: i64[L], copies of each expert.
        starts: i64[L + 1], first row of each expert, and the end.
    """

    group: Ints
    place: Ints
    row: Ints
    counts: Ints
    starts: Ints


def private_limits(config: MoeConfig, before: Routes | None) -> Ints:
    """Number of private slots of each group at each rank; i64[G, world].

    Args:
        config: of the all-to-all.
        before: routes of the turn before, which all ranks know; None: there was none.

    Returns:
        Equal shares; or, with adaptive sizes, shares by what came the turn before and two standard
        deviations more. The slots of a rank stay G * private_tokens in all, and never leave more
        for the shared area than equal shares could: a group gets T * min(R, L) at the most, and
        all that is there is shared out.
    """
    each = np.full((config.groups, config.world), config.private_tokens, np.int64)
    if before is None or config.private_sizes == "equal":
        return each
    most = config.max_tokens * config.copies_per_token
    own = np.arange(config.world) // config.dp_size == np.arange(config.groups)[:, None]
    budget = (config.groups - 1) * min(config.private_tokens, most)
    wish = before.copies + np.ceil(2 * np.sqrt(before.copies)).astype(np.int64)
    wish = np.where(own, 0, np.minimum(wish, most))
    # A peer that gets a second burst costs the same whether it is one copy or fifty: so where the
    # slots do not suffice for all, the small ones are served whole.
    order = np.argsort(wish, axis=0, kind="stable")
    ordered = np.take_along_axis(wish, order, axis=0)
    served = np.where(np.cumsum(ordered, axis=0) <= budget, ordered, 0)
    limits = np.zeros_like(wish)
    np.put_along_axis(limits, order, served, axis=0)
    room = np.where(own, 0, most) - limits
    left = budget - limits.sum(axis=0)
    limits += np.clip(left - (np.cumsum(room, axis=0) - room), 0, room)
    return limits


class Routes:
    """The counts of one turn, and all places that follow from them.

    Args:
        config: of the all-to-all.
        counts: i64[G, E], copies by group and expert.
        limits: i64[G, world], private slots of each group at each rank.

    Attributes:
        counts: as given.
        copies: i64[G, world], copies from each group to each rank.
        starts: i64[G, world], where a rank's block starts in the group's sending order.
        private: i64[G, world], copies that go to the private area.
        rest: i64[G, world], copies that go to the shared area.
        private_at: i64[G, world], where a group's slots start in a rank's private area.
        shared_at: i64[G, world], where the rest of a group starts in a rank's shared area.
    """

    def __init__(self, config: MoeConfig, counts: Ints, limits: Ints) -> None:
        assert counts.shape == (config.groups, config.num_experts), counts.shape
        self.config = config
        self.counts = counts
        shape = (config.groups, config.world, config.local_experts)
        self.copies: Ints = counts.reshape(shape).sum(axis=2)
        self.starts: Ints = np.cumsum(self.copies, axis=1) - self.copies
        own = np.arange(config.world) // config.dp_size
        foreign = own[None, :] != np.arange(config.groups)[:, None]
        self.private: Ints = np.minimum(self.copies, limits) * foreign
        self.private_at: Ints = np.cumsum(limits, axis=0) - limits
        self.rest: Ints = (self.copies - self.private) * foreign
        self.shared_at: Ints = np.cumsum(self.rest, axis=0) - self.rest

    def result_starts(self, rank: int) -> Ints:
        """Start of each group's block in a rank's combine source; i64[G]."""
        mine = self.copies[:, rank]
        return np.cumsum(mine) - mine

    def arrivals(self, rank: int) -> Arrivals:
        """Every copy that a rank gets."""
        config = self.config
        first = rank * config.local_experts
        mine = self.counts[:, first : first + config.local_experts]
        before = np.cumsum(mine, axis=1) - mine  # in the block of its group
        totals = mine.sum(axis=0)
        padded = -(-totals // config.expert_padding) * config.expert_padding
        starts = np.concatenate(([0], np.cumsum(padded)))
        rows = starts[:-1] + np.cumsum(mine, axis=0) - mine  # first row of (group, expert)
        lengths = mine.T.ravel()  # expert by expert, group by group
        run = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        group = np.tile(np.arange(config.groups), config.local_experts)
        return Arrivals(
            np.repeat(group, lengths),
            np.repeat(before.T.ravel(), lengths) + run,
            np.repeat(rows.T.ravel(), lengths) + run,
            totals,
            starts,
        )
