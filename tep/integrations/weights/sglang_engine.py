"""SGLang's weight updates over tep: `load` is a custom weight loader of its servers; see README.md.

Each tensor parallel rank asks only for what its layers read of a weight. Versions arrive beside the
model while the server goes on; `Load` touches the model, in one call between two steps. SGLang has
no answer for a loader that fails: the error ends the server, which also keeps it from answering
with half of a version.
"""

from __future__ import annotations

import base64
import pickle
import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import torch

from tep import TepError, UsageError
from tep.integrations.weights.member import Fabric, Meeting, Member
from tep.integrations.weights.shards import Shards

__all__ = ["LOADER", "Join", "Load", "load", "order"]

LOADER: Final = f"{__name__}.load"
"""The load format of `update_weights_from_tensor`."""


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Take part in the updates of the hub at a Meeting, of `Member.lead`; once for each server.

    Backend, options and timeout_s: see Fabric. `shards`: ask only for what this rank reads of each
    weight.
    """

    meeting: Meeting
    backend: str = "local"
    options: dict[str, Any] = {}
    timeout_s: float = 300.0
    shards: bool = True


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Load a version, once `Member.send` has returned at the trainer."""

    version: int


class _Rank:
    def __init__(self, model: Any, join: Join) -> None:
        fabric = Fabric(join.backend, join.options, timeout_s=join.timeout_s)
        self._model, self._timeout_s = model, join.timeout_s
        self._shards = Shards(model, whole=not join.shards)
        self.member = Member(f"sglang-{uuid.uuid4().hex[:12]}", fabric)
        try:
            self.member.receive_from(join.meeting, self._shards.wants)
        except TepError:
            self.member.close()
            raise

    def load(self, version: int) -> None:
        self.member.whole(version, self._timeout_s)
        device = next(iter(self._model.parameters())).device
        with self.member.read(version) as weights:
            self._model.load_weights(self._shards.wholes(weights, device))
            self._shards.prove()


_ranks: dict[Any, _Rank] = {}


def order(what: Join | Load) -> str:
    """Make one rank's item of `serialized_named_tensors` from an order.

    The words are the name of a tensor without bytes, in an ordinary pickle: SGLang's own would name
    shared memory, which is no use to a server on another machine.
    """
    named = [(msgspec.json.encode(what).decode(), torch.empty(0))]
    return base64.b64encode(pickle.dumps(named)).decode()


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Obey an order; called by SGLang in each rank's process.

    Raises:
        UsageError: no order of `order`, or a version before the server has joined.
        TepError: the hub is not there, or the version is not.
    """
    try:
        ((words, _),) = named_tensors
        what = msgspec.json.decode(words, type=Join | Load, strict=True)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"load_format={LOADER!r} wants tensors of order(): {error}") from error
    rank = _ranks.get(model)
    if isinstance(what, Join):
        if rank is not None:
            rank.member.close()
        _ranks[model] = _Rank(model, what)
    elif rank is None:
        raise UsageError(f"version {what.version} was ordered before this server has joined")
    else:
        rank.load(what.version)
