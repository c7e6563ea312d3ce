"""Write tests/abi/cuda_python.json, where cuda-python is installed; it needs no GPU.

The calls and constants are those of the fake driver: each call with its number of arguments, each
constant with its value. Releases 12.9.10 and 13.4.4 agree.
"""

from __future__ import annotations

import importlib
import json
import sys
from enum import IntEnum
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.support import fake_cuda  # noqa: E402  # the path comes first


def facts(real: object, nvrtc: object) -> dict[str, dict[str, int]]:
    """Arguments of each call, and value of each constant, that the fakes have."""
    found: dict[str, dict[str, int]] = {"calls": {}, "constants": {}}
    fakes = (fake_cuda.FakeKernels, fake_cuda.FakeCuda, fake_cuda.FakeNvrtc)
    for name in sorted({name for fake in fakes for name in vars(fake)}):
        if name.startswith(("cu", "nvrtc")):
            package = nvrtc if name.startswith("nvrtc") else real
            signature = getattr(package, name).__doc__.splitlines()[0]
            inside = signature.partition("(")[2].rpartition(")")[0]
            found["calls"][name] = len([part for part in inside.split(", ") if part.strip()])
    for name, enum in vars(fake_cuda).items():
        if isinstance(enum, type) and issubclass(enum, IntEnum) and enum is not IntEnum:
            for member in enum:
                found["constants"][member.name] = int(getattr(getattr(real, name), member.name))
    return found


if __name__ == "__main__":
    version = importlib.import_module("cuda.bindings").__version__
    driver, nvrtc = (
        importlib.import_module(f"cuda.bindings.{name}") for name in ("driver", "nvrtc")
    )
    seen = {"cuda-bindings": version, **facts(driver, nvrtc)}
    (HERE / "cuda_python.json").write_text(json.dumps(seen, indent=1) + "\n")
