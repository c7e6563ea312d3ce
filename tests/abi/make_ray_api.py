"""Record the parts of Ray's interface that tep.integrations.ray stands on, from a Python with Ray.

Usage: PYTHON_WITH_RAY tests/abi/make_ray_api.py > tests/abi/ray_api.json
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys

import ray
from ray import exceptions
from ray._common import ray_option_utils
from ray.experimental import register_tensor_transport
from ray.experimental.rdt import tensor_transport_manager as interface
from ray.remote_function import RemoteFunction

CALLS = (
    "cancel",
    "cluster_resources",
    "get",
    "init",
    "is_initialized",
    "kill",
    "put",
    "remote",
    "shutdown",
    "wait",
)
ERRORS = (
    "NodeDiedError",
    "OutOfMemoryError",
    "RayError",
    "RayTaskError",
    "RuntimeEnvSetupError",
    "TaskUnschedulableError",
    "WorkerCrashedError",
)


def parameters(function: object) -> list[str]:
    """The names of its parameters, *args and **kwargs with their stars."""
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    return [
        stars.get(one.kind.name, "") + one.name
        for one in inspect.signature(function).parameters.values()
    ]


def main() -> int:
    """Print the record."""
    found = {
        "ray": ray.__version__,
        "calls": {name: parameters(getattr(ray, name)) for name in CALLS},
        "errors": {
            name: [one.__name__ for one in getattr(exceptions, name).__mro__[1:]] for name in ERRORS
        },
        "a task's error": parameters(exceptions.RayTaskError.__init__),
        "actor options": sorted(ray_option_utils.actor_options),
        "transport": {
            name: parameters(function)
            for name, function in inspect.getmembers(
                interface.TensorTransportManager, inspect.isfunction
            )
        },
        "transport must have": sorted(interface.TensorTransportManager.__abstractmethods__),
        "transport fields": {
            name: [one.name for one in dataclasses.fields(getattr(interface, name))]
            for name in ("CommunicatorMetadata", "FetchRequest", "TensorTransportMetadata")
        },
        "register_tensor_transport": parameters(register_tensor_transport),
        "task": {"options": parameters(RemoteFunction.options)},
        "task options": sorted(ray_option_utils.task_options),
    }
    json.dump(found, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
