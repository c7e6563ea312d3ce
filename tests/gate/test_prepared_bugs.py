"""The gate of prepared transfers: each planted bug makes a drawn run differ from the verbs' run."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tep.core.group import Dealt, DomainGroup, Laid
from tep.engine import prepared
from tep.engine.prepared import Prepared
from tests.gate.registry import Change, changed
from tests.property.test_prepared import NBYTES, WRITES, Happens, Submit, World
from tests.support.planted import first_shown

SEEDS = 150

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


def run(seed: int) -> None:
    """One drawn script has the same effect by prepared transfers and by the verbs."""
    dice = random.Random(seed)
    nics = dice.randint(1, 3), dice.randint(1, 3), dice.randint(1, 2)
    script: list[Submit | Happens] = []
    kinds = dice.sample(WRITES, 2)  # few, so that a kind comes often at every cursor
    for _ in range(50):
        chance = dice.random()
        if chance < 0.04:
            what = dice.choice(["kill here", "kill there", "restart", "withdraw", "remove"])
            script.append(Happens(what, dice.randrange(3)))
        elif chance < 0.5:
            script.append(Happens("pass", dice.randrange(1, 20)))
        else:
            offsets = [dice.choice([0, 32, 64, -32, NBYTES]) for _ in range(2)]
            kind = dice.choice(kinds)
            script.append(Submit(kind, dice.choice([3, 4, None]), *offsets))
    found = []
    for by_prepared in (True, False):
        world = World(seed, nics, prepared=by_prepared)
        with world.cluster:
            world.play(script)
            found.append(world.result())
    assert found[0] == found[1]


class _Same:
    """Equal to every number."""

    def __ne__(self, _: object) -> bool:
        return False

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def after_renewal(change: Callable[[Prepared], object]) -> list[Change]:
    """Change what every layout leaves behind."""
    renew = Prepared._renew

    def renewed(self):
        renew(self)
        change(self)

    return [(Prepared, "_renew", renewed)]


def peers_are_looked_up_once() -> list[Change]:
    """A peer that restarted, or was removed, is written to as before."""
    return after_renewal(lambda self: setattr(self, "_generation", _Same()))


def routes_are_looked_up_once() -> list[Change]:
    """After a NIC has died, prepared writes go where they went before."""
    return [(Laid, "find", lambda self, cursor, _: self.dealt.get(cursor % self.cycle))]


def cursor_stands_still() -> list[Change]:
    """Every submit begins at the lane at which the first one began."""
    return [(Laid, "find", lambda self, *_: next(iter(self.dealt.values()), None))]


def offsets_exchanged() -> list[Change]:
    """The source's offset is added at the target."""
    at = Dealt.at
    return [(Dealt, "at", lambda self, here, there: at(self, there, here))]


def parts_beside_a_backlog() -> list[Change]:
    """A prepared write is posted at once although others wait."""
    start = DomainGroup.start_ready

    def first(self, transfer, job, dealt, *, alone):
        start(self, transfer, job, dealt, alone=True)

    return [(DomainGroup, "start_ready", first)]


def batches_in_use_are_posted() -> list[Change]:
    """The batches of the submit before are filled anew while NICs still have rows of them."""
    posts = Dealt.posts

    def posted(self, transfer, job):
        if not self.kept:
            return posts(self, transfer, job)
        self._move(self.kept, job.here, job.there)
        return self.kept

    return [(Dealt, "posts", posted)]


def columns_stay() -> list[Change]:
    """Batches that are posted again go where they went before."""
    return [(Dealt, "_move", lambda *_: None)]


def bounds_forgotten() -> list[Change]:
    """Offsets lead out of the regions."""
    return [(prepared, "_room", lambda *_: (-(2**40), 2**40))]


BUGS = [
    peers_are_looked_up_once,
    routes_are_looked_up_once,
    cursor_stands_still,
    offsets_exchanged,
    parts_beside_a_backlog,
    batches_in_use_are_posted,
    columns_stay,
    bounds_forgotten,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_planted_bug_is_found(plant: Callable[[], list[Change]]) -> None:
    """A prepared transfer that does not follow what changes is found here, or by a user."""
    with changed(plant()):
        found = first_shown(plant.__name__, run, range(SEEDS))

    assert found is not None, f"{plant.__name__} survived {SEEDS} seeds"


def test_prepared_transfers_are_clean() -> None:
    """The bugs would be found in vain if the engine as it is differed, too."""
    for seed in range(SEEDS):
        run(seed)
