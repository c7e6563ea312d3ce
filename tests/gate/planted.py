"""All planted bugs: protocol mistakes that are easily made, as patches of the product.

Of the 32 bugs that this list began with, one cannot be made here: `recv_not_replenished`, since the
backend, not the engine, posts the receives that immediates use up. `message_buffer_kept` is the
same mistake where the engine can still make it.
"""

from __future__ import annotations

from tests.gate import (
    bugs_counting,
    bugs_ending,
    bugs_failing,
    bugs_failover,
    bugs_fairness,
    bugs_posting,
)
from tests.gate.registry import BUGS, Bug, planted

__all__ = [
    "BUGS",
    "Bug",
    "bugs_counting",
    "bugs_ending",
    "bugs_failing",
    "bugs_failover",
    "bugs_fairness",
    "bugs_posting",
    "planted",
]
