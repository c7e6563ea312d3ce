"""New weights for SGLang's layers by its own updater; and what its ranks ask for.

Run by scripts/integrations.py in an environment that has SGLang without its kernels. One process
has the layers of four tensor parallel ranks, each with SGLang's WeightUpdater, which calls tep's
loader as a server does. Their parameters must be those of ranks that loaded everything, and no more
bytes may have been written than they hold. No server runs, no kernel, and no GPU.
"""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from unittest import mock

import sglang_nixl
import torch
from layers import HIDDEN, RANKS, WORDS, Model, compare, drawn, fill

from tep.integrations.weights.member import Fabric, Member
from tep.integrations.weights.sglang_engine import LOADER, Join, Load, load, order

linear, embedding, updating, utils = sglang_nixl.rooms(
    "layers.linear",
    "layers.vocab_parallel_embedding",
    "model_executor.model_runner_components.weight_updater",
    "utils",
)


def parallel(rank: int) -> SimpleNamespace:
    """The parallelism of one rank, before any communication."""
    groups = {"tp_group": None, "tp_size": RANKS, "tp_rank": rank}
    return SimpleNamespace(**groups, **{f"attn_{name}": one for name, one in groups.items()})


def at(rank: int) -> contextlib.ExitStack:
    """Have SGLang's rooms believe that this is a rank."""
    stack = contextlib.ExitStack()
    for room in (linear, embedding, updating):
        stack.enter_context(mock.patch.object(room, "get_parallel", return_value=parallel(rank)))
    return stack


def model_of(rank: int) -> Model:
    """The layers of one rank; two ranks share a head of keys and values."""
    with at(rank):
        return fill(Model(), linear, embedding)


def updater_of(model: Model, rank: int):
    """SGLang's updater of a model, as the server's model runner makes it."""
    return updating.WeightUpdater(
        tp_rank=rank,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={LOADER: load},
        get_model=lambda: model,
        update_model_fields=None,
        recapture_cuda_graph=None,
        get_model_runner=None,
    )


def main() -> int:
    """Update twice; print the result."""
    found = compare(model_of)
    models = [model_of(rank) for rank in range(RANKS)]
    updaters = [updater_of(model, rank) for rank, model in enumerate(models)]

    def everywhere(what: Join | Load) -> None:
        """Order it of all ranks, by what a trainer sends over HTTP."""
        for rank, updater in enumerate(updaters):
            tensors = utils.MultiprocessingSerializer.deserialize(order(what))
            with at(rank):
                good, said = updater.update_weights_from_tensor(tensors, load_format=LOADER)
            assert good, said

    trainer = Member("trainer", Fabric())
    moved = same = 0
    settings = SimpleNamespace(weight_cache_mode="off")
    with mock.patch.object(updating, "get_model", return_value=settings):
        everywhere(Join(trainer.lead(world=1)))
        for version in (1, 2):
            weights = drawn()
            report = trainer.send(list(weights.items()), version)
            moved += sum(train.written_bytes for train in report.trains)
            everywhere(Load(version))
            for rank, model in enumerate(models):
                whole = model_of(rank)
                whole.load_weights(weights.items())
                pairs = zip(whole.parameters(), model.parameters())
                same += sum(torch.equal(one, other) for one, other in pairs)
    trainer.close()
    held = sum(one.nbytes for model in models for one in model.parameters())
    ideal = 2 * (held - 2 * (128 - WORDS) * HIDDEN * 4)
    total = 2 * sum(len(list(model.parameters())) for model in models)
    found["updates by SGLang's updater: equal parameters"] = f"{same} of {total}"
    found["bytes written over the bytes held"] = round(moved / ideal, 3)
    found["ok"] = bool(found["ok"]) and same == total and ideal <= moved <= 1.02 * ideal
    print(json.dumps(found))  # noqa: T201  # the result
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
