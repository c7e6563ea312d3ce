"""Shipped to users: the contract suite for backends, and what stands on it.

Importing this room loads nothing; `tep.testing.contract` is the door for authors of backends.
"""

from __future__ import annotations

import sys

__all__ = ()

if "pytest" in sys.modules:
    # Failed assertions of the suite should show their values, as those of a test file do. It has to
    # be said before these rooms are imported, and costs nothing where no test runs.
    sys.modules["pytest"].register_assert_rewrite(
        "tep.testing.clauses_engine",
        "tep.testing.clauses_errors",
        "tep.testing.clauses_imms",
        "tep.testing.clauses_life",
        "tep.testing.clauses_messages",
        "tep.testing.clauses_rows",
        "tep.testing.net",
    )
