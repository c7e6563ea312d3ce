"""Record the names and signatures of NIXL's Python interface, from a Python that has `nixl`.

Usage: PYTHON_WITH_NIXL tests/abi/make_nixl_api.py > tests/abi/nixl_api.json
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import sys


def shape(function: object) -> list[list[str]]:
    """(name, kind, default) of each parameter."""
    return [
        [one.name, one.kind.name, "" if one.default is one.empty else repr(one.default)]
        for one in inspect.signature(function).parameters.values()
    ]


def main() -> int:
    """Print the record."""
    api, bindings = (importlib.import_module(f"nixl.{name}") for name in ("_api", "_bindings"))
    classes = ("nixl_agent", "nixl_agent_config", "nixl_xfer_handle", "nixl_prepped_dlist_handle")
    found = {
        "nixl": importlib.metadata.version("nixl"),
        "classes": {
            name: {
                method: shape(function)
                for method, function in sorted(vars(getattr(api, name)).items())
                if inspect.isfunction(function)
                and (not method.startswith("_") or method == "__init__")
            }
            for name in classes
        },
        "names": sorted(
            name for name in vars(api) if name.startswith("nixl") or name == "DEFAULT_COMM_PORT"
        ),
        "bindings": sorted(name for name in dir(bindings) if not name.startswith("_")),
        "lists": {
            name: sorted(m for m in dir(getattr(bindings, name)) if not m.startswith("_"))
            for name in ("nixlXferDList", "nixlRegDList")
        },
        "telemetry": sorted(m for m in dir(bindings.nixlXferTelemetry) if not m.startswith("_")),
    }
    json.dump(found, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
