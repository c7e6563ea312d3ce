"""Planted bugs: when transfers end, and how: completions, cancels, errors."""

from __future__ import annotations

from collections.abc import Callable

from tep.backends.base import Status
from tep.core.group import DomainGroup
from tep.core.handles import State, Transfer
from tep.engine.worker import Worker
from tests.gate.registry import GROUP, HANDLES, WORKER, Change, bug, mistake

# ---------------------------------------------------------------------- when a transfer is done


def settles_when(early: Callable[[Transfer, DomainGroup], bool]) -> list[Change]:
    """End a transfer as soon as early() says so; its later rows come back to nobody."""
    finish, post = DomainGroup.finish_rows, DomainGroup.post

    def end_early(group: DomainGroup, transfer: Transfer) -> None:
        if not transfer.finished and transfer not in group.ended and early(transfer, group):
            group.ended.append(transfer)

    def finish_rows(self, domain, ctx, count, status, row):
        transfer = self.batches[ctx].transfer
        ended, self.ended = self.ended, []
        finish(self, domain, ctx, count, status, row)
        again, self.ended = self.ended, ended
        self.ended += [t for t in again if not t.finished and t not in ended]
        end_early(self, transfer)

    def post_all(self, first=0):
        waiting = [pending.transfer for queue in self._queues for pending in queue]
        work = post(self, first)
        for transfer in waiting:
            end_early(self, transfer)
        return work

    return [(DomainGroup, "finish_rows", finish_rows), (DomainGroup, "post", post_all)]


@bug()
def done_at_post() -> list[Change]:
    """A transfer is done when its last row is posted, not when it is back."""
    return settles_when(lambda transfer, _: transfer.stats().rows_posted == transfer.rows)


@bug()
def done_one_row_early() -> list[Change]:
    """Off by one: the last row is not waited for."""
    return settles_when(lambda transfer, _: transfer.rows > 1 and transfer.left <= 1)


@bug()
def done_on_first_nic() -> list[Change]:
    """The first NIC that has returned all it had ends the transfer for all of them."""

    def early(transfer: Transfer, group: DomainGroup) -> bool:
        open_on = {p.domain for p in group.batches.values() if p.transfer is transfer}
        used = {k for k, nic in enumerate(transfer.stats().nics) if nic.rows}
        return transfer.left > 0 and not used <= open_on

    return settles_when(early)


@bug()
def source_not_held() -> list[Change]:
    """Transfers take no hold of their source region: it can be given back under a NIC's hands."""
    return mistake("tep/engine/verbs.py", "if mr.inflight:", "if False:")


@bug()
def callback_twice() -> list[Change]:
    """A settled handle keeps its callbacks, and stands twice in the list of what to deliver."""
    takes, last = (
        "callbacks, self._callbacks = self._callbacks, None",
        "        del self.open[handle]\n",
    )
    return [
        *mistake(HANDLES, takes, "callbacks = self._callbacks"),
        *mistake(WORKER, last, f"{last}        self._settled.append(handle)\n"),
    ]


@bug()
def source_never_released() -> list[Change]:
    """A transfer that did not end well keeps its hold on the source region."""
    return mistake(WORKER, "mr.inflight -= 1", "mr.inflight -= state is _DONE")


# ---------------------------------------------------------------------- cancel and error


def cancels(how: Callable[[Worker, Transfer], None]) -> list[Change]:
    """Cancel transfers in another way; and take their rows back without a second end."""
    cancel = Worker.cancel

    def other(self, handle):
        if handle.finished or not isinstance(handle, Transfer):
            cancel(self, handle)
        else:
            how(self, handle)

    finish_rows = settles_when(lambda *_: False)[0]
    return [(Worker, "cancel", other), finish_rows]


@bug()
def cancel_confirmed_early() -> list[Change]:
    """Cancel is confirmed while NICs still hold rows."""

    def how(worker, transfer):
        if worker.group.drop_queued(transfer):
            worker._end(transfer, State.CANCELLED)

    return cancels(how)


@bug()
def cancel_leaves_queue() -> list[Change]:
    """Cancel ends the handle, and leaves its rows in the queues."""
    return cancels(lambda worker, transfer: worker._end(transfer, State.CANCELLED))


@bug()
def cancel_lost() -> list[Change]:
    """Cancel does nothing."""
    return cancels(lambda *_: None)


@bug()
def error_counted_as_success() -> list[Change]:
    """A row that failed counts as one that is back."""
    finish = DomainGroup.finish_rows

    def forgiving(self, domain, ctx, count, _status, row):
        finish(self, domain, ctx, count, Status.OK, row)

    return [(DomainGroup, "finish_rows", forgiving)]


@bug()
def error_then_done() -> list[Change]:
    """A later row that succeeds wipes out an earlier error."""
    finish = DomainGroup.finish_rows

    def forgetful(self, domain, ctx, count, status, row):
        transfer = self.batches[ctx].transfer
        if status == Status.OK:
            transfer.failure = None
        finish(self, domain, ctx, count, status, row)

    return [(DomainGroup, "finish_rows", forgetful)]


@bug()
def error_before_drain() -> list[Change]:
    """The first error ends the transfer while other rows of it are out."""
    return settles_when(lambda transfer, _: transfer.failure is not None)


@bug()
def replay_after_error() -> list[Change]:
    """A failed row is sent again over another NIC; its immediate may count twice."""
    fail_rows = DomainGroup._fail_rows

    def replay(self, pending, count, status, row):
        transfer = pending.transfer
        if transfer.failure is not None or not any(self.alive):
            fail_rows(self, pending, count, status, row)
            return
        transfer.left += count
        for moved in self._moved(pending, row, row + count):
            self._push(moved)

    return [(DomainGroup, "_fail_rows", replay)]


@bug()
def failed_rows_stay_queued() -> list[Change]:
    """After an error the rest of the transfer is neither posted nor taken out of the account."""
    drops = "            self.drop_queued(transfer)"
    return mistake(GROUP, drops, drops.replace("self", "transfer.left += self"))
