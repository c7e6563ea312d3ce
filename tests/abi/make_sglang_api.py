"""Record what SGLang's NIXL backend asks of NIXL and of plug-ins, from a Python with SGLang.

Usage: PYTHON_WITH_SGLANG tests/abi/make_sglang_api.py > tests/abi/sglang_api.json

The sources are read and not imported, since they import kernels that exist for GPUs only.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    """Print the record."""
    root = Path(find_spec("sglang").submodule_search_locations[0], "srt")
    module = ast.parse((root / "disaggregation" / "nixl" / "conn.py").read_text("utf-8"))
    calls, names = set(), set()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nixl"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.startswith("self.agent.") or called in {"nixl_agent", "nixl_agent_config"}:
                keywords = sorted(word.arg or "**" for word in node.keywords)
                name = called.removeprefix("self.agent.")
                if "." not in name:  # self.agent.name.encode()
                    calls.add((name, len(node.args), *keywords))
    plugins = (root / "plugins" / "__init__.py").read_text("utf-8")
    groups = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(plugins).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    found = {
        "sglang": importlib.metadata.version("sglang"),
        "calls": sorted(map(list, calls), key=str),
        "imports": sorted(names),
        "group of plug-ins": groups["GENERAL_PLUGINS_GROUP"],
    }
    json.dump(found, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
