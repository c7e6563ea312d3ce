"""State machines of users on hostile clusters: a right one passes, a wrong one is found."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

import tep
from tep.testing import ClusterMachine

FEW = settings(
    max_examples=100,
    stateful_step_count=5,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
)


class Store(ClusterMachine):
    """A page store: what was put is read; a source is written again only when it is free."""

    waits = True

    def begin(self) -> None:
        self.writer, reader = self.cluster.engines
        self.source, self.pages = bytearray(256), bytearray(4 * 256)
        self.mr, _ = self.writer.reg_mr(self.source, access=tep.Access.SOURCE)
        _, self.desc = reader.reg_mr(self.pages)
        self.model, self.sent = {}, []

    @rule(value=st.integers(1, 255))
    def put(self, value: int) -> None:
        if self.waits:
            self.settle()
        page = len(self.model) % 4
        self.source[:] = bytes([value]) * 256
        self.sent.append(
            self.writer.submit_single_write(256, (self.mr, 0), (self.desc, 256 * page))
        )
        self.model[page] = value

    @rule()
    def settle(self) -> None:
        while self.sent:
            self.sent.pop().wait()
        for page, value in self.model.items():
            assert bytes([value]) * 256 == self.pages[256 * page : 256 * page + 256], page


class Hasty(Store):
    """The same, which does not wait until its source is free."""

    waits = False


def test_a_right_machine_passes() -> None:
    """Disorder alone must break no rule."""
    run_state_machine_as_test(Store, settings=settings(FEW, max_examples=15))


@pytest.mark.slow
def test_a_wrong_machine_is_found_and_shrunk(capsys) -> None:
    """The rules that show it, and the case, are what a reader needs."""
    with pytest.raises(AssertionError) as found:
        run_state_machine_as_test(Hasty, settings=FEW)
    said = "\n".join(getattr(found.value, "__notes__", [])) + capsys.readouterr().out

    assert "state.put(" in said
    assert "state.settle()" in said
    assert "(case): Case(nics=" in said, "a field a line is 60 lines"


def test_what_never_ends_is_found_at_the_end() -> None:
    """A machine whose rules forget a transfer must not pass for one that waits for it."""

    class Forgets(ClusterMachine):
        faults = "none"

        @rule()
        def wait_for_nothing(self) -> None:
            _, reader = self.cluster.engines
            reader.submit_recvs(64, 1, lambda _: 1 // 0)
            self.cluster.engines[0].submit_send(reader.main_address, b"x")

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_state_machine_as_test(Forgets, settings=FEW)
