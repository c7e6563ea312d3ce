"""The contract's suite: subclass DomainContract, give it a `world` fixture, and run pytest.

    import pytest
    from my_backend import open_domains
    from tep.testing.contract import DomainContract, OpenWorld

    class TestMyBackend(DomainContract):
        @pytest.fixture
        def world(self):
            with OpenWorld(lambda nics: open_domains(nics=nics)) as world:
                yield world

Each test carries the number of its clause in CONTRACT.md. The tests are in the clauses_* rooms;
here they are put together, with the table of known gaps and a way to run a clause without pytest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final

import pytest

from tep.testing.clauses_life import ErrorsContract, LifeContract
from tep.testing.clauses_messages import ControlContract, MessagesContract
from tep.testing.clauses_reads import ReadsContract
from tep.testing.clauses_rows import ImmsContract, RowsContract
from tep.testing.world import Ability, Net, Node, OpenWorld, World

__all__ = ["Ability", "DomainContract", "Node", "OpenWorld", "World", "first_failure", "tests_of"]

_TEST: Final = re.compile(r"test_c(\d\d)_\w+")


class DomainContract(
    RowsContract,
    ImmsContract,
    ErrorsContract,
    MessagesContract,
    ControlContract,
    ReadsContract,
    LifeContract,
):
    """Every clause that shows at the seam; a subclass named Test... gives the fixture `world`.

    Attributes:
        gaps: what this backend is known not to do: test name -> reason. Each is run as a strict
            xfail, so that a gap that has closed is noticed.
    """

    gaps: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @pytest.fixture
    def net(self, world: World) -> Net:
        """The sides of one test, in the subclass' world."""
        return Net(world)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Mark the known gaps."""
        super().__init_subclass__(**kwargs)
        for name, reason in cls.gaps.items():
            test = getattr(cls, name, None)
            if test is None or _TEST.fullmatch(name) is None:
                raise TypeError(
                    f"{cls.__name__}.gaps names {name}, which is no test of the contract"
                )
            setattr(cls, name, pytest.mark.xfail(strict=True, reason=reason)(_copy(test)))


def _copy(test: Callable[..., None]) -> Callable[..., None]:
    """Wrap a test, so that a mark on it does not mark every other backend's."""

    @functools.wraps(test)
    def same(*args: Any, **kwargs: Any) -> None:
        test(*args, **kwargs)

    return same


def tests_of(clause: int) -> list[str]:
    """Names of the tests of one clause, in order."""
    found = (_TEST.fullmatch(name) for name in dir(DomainContract))
    return sorted(match[0] for match in found if match is not None and int(match[1]) == clause)


def first_failure(make_world: Callable[[], World], clause: int) -> str:
    """Run one clause's tests up to the first failure, each in a fresh world, without a runner.

    Returns:
        The failed test and what it says; "" if the backend keeps the clause, or cannot be asked for
        want of an ability.
    """
    for name in tests_of(clause):
        with make_world() as world:
            try:
                getattr(DomainContract(), name)(Net(world))
            except AssertionError as error:
                return f"{name}: {error}"
            except pytest.skip.Exception:
                continue
    return ""
