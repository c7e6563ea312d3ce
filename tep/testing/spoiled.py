"""All spoiled loopbacks: each breaks one clause, and the contract's suite must fail it there.

The classes are in `spoiled_rows`, `spoiled_life`, `spoiled_messages`, `spoiled_control` and
`spoiled_reads`.
"""

from __future__ import annotations

from tep.testing import (
    spoiled_control,
    spoiled_life,
    spoiled_messages,
    spoiled_reads,
    spoiled_rows,
)
from tep.testing.spoiled_base import SPOILED, Spoiled, SpoiledWorld

__all__ = ["SPOILED", "Spoiled", "SpoiledWorld"]

assert spoiled_rows.__all__, "importing the rooms fills the list"
assert spoiled_life.__all__, "importing the rooms fills the list"
assert spoiled_messages.__all__, "importing the rooms fills the list"
assert spoiled_control.__all__, "importing the rooms fills the list"
assert spoiled_reads.__all__, "importing the rooms fills the list"
