"""The apps' immediates: no two of them claim the same, so that they can share an engine."""

from __future__ import annotations

import inspect
from itertools import pairwise

from tep import apps
from tep.apps.kvcache import KvReceiver
from tep.apps.moe.config import MoeConfig
from tep.apps.rl.ports import ATTEMPTS, Kind, make_imm


def test_ranges_do_not_overlap():
    """Two apps that count the same immediate release each other's readers early."""
    ranges = sorted((apps.KVCACHE, apps.MOE, apps.RL), key=lambda one: one.start)

    assert all(before.stop <= after.start for before, after in pairwise(ranges))
    assert ranges[-1].stop <= 1 << 32


def test_each_app_keeps_to_its_own():
    """A range that is written down and not kept to protects nobody."""
    assert apps.KVCACHE == inspect.signature(KvReceiver).parameters["imms"].default
    for kind in Kind:
        assert make_imm(kind, 0) in apps.RL
        assert make_imm(kind, ATTEMPTS - 1, (1 << 16) - 1) in apps.RL
    default = inspect.signature(MoeConfig).parameters["imm_base"].default
    assert default in apps.MOE
    assert default + (1 << 28) - 1 in apps.MOE
