"""SGLang's plug-in: what its NIXL backend asks for is there, and the switch does what it says."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tep.compat.nixl import api, bindings
from tep.integrations import sglang

ROOT = Path(__file__).resolve().parents[3]
RECORD = json.loads((ROOT / "tests" / "abi" / "sglang_api.json").read_text("utf-8"))


@pytest.mark.parametrize("call", RECORD["calls"], ids=lambda call: f"{call[0]}-{call[1]}")
def test_every_call_of_sglang_fits(call) -> None:
    """A call that does not fit fails in a scheduler, at its first request."""
    name, places, *words = call
    if name in {"nixl_agent", "nixl_agent_config"}:
        function, ours = getattr(api, name), 0
    else:
        function, ours = getattr(api.nixl_agent, name), 1
    inspect.signature(function).bind(*[None] * (places + ours), **dict.fromkeys(words))


def test_every_name_that_sglang_imports_is_there() -> None:
    """Its backend falls back to RuntimeError if one error of NIXL is missing."""
    rooms = {"nixl._api": api, "nixl._bindings": bindings}
    for path in RECORD["imports"]:
        room, _, name = path.rpartition(".")
        assert hasattr(rooms[room], name), path


def test_sglang_finds_the_plugin() -> None:
    """Under another group nobody would call it, and NIXL would run in tep's place."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    mine = project["entry-points"][RECORD["group of plug-ins"]]

    assert {"tep": "tep.integrations.sglang:load"} == mine
    assert callable(sglang.load)


def loaded(switch: str, before: str = "") -> str:
    """Return the module that a process with the plug-in imports under NIXL's name."""
    program = (
        "import os, sys, types\n"
        f"os.environ['TEP_SGLANG'] = {switch!r}\n{before}\n"
        "from tep.integrations.sglang import load\n"
        "try:\n    load(); load()\n"
        "except Exception as error:\n    print(type(error).__name__, error); sys.exit()\n"
        "if 'nixl' in sys.modules:\n"
        "    import nixl._api\n    from nixl._bindings import nixlBackendError\n"
        "    print(nixl._api.__name__)\n"
        "else:\n    print('nothing')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_the_switch() -> None:
    """Whoever has NIXL and installs tep beside SGLang must keep NIXL until they say otherwise."""
    other = "sys.modules['nixl'] = types.ModuleType('nixl'); sys.modules['nixl'].__file__ = '/x'"

    assert "nothing" == loaded("0")
    assert "tep.compat.nixl.api" == loaded("1")
    assert loaded("yes").startswith("UsageError TEP_SGLANG='yes': 1 puts tep in NIXL's place")
    assert "imported NIXL from /x already" in loaded("1", other)
