"""SGLang's plug-in: the transfer backend `nixl` of its PD disaggregation runs on tep.

SGLang calls `load` in each of its processes, by the entry point `sglang.srt.plugins`. Nothing of
SGLang is imported or replaced here: its own NIXL classes import `nixl`, and get `tep.compat.nixl`.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

from tep import UsageError
from tep.compat import nixl

__all__ = ["SWITCH", "load"]

SWITCH: Final = "TEP_SGLANG"
"""The environment variable: 1 puts tep in NIXL's place; unset, the plug-in does nothing."""


def load() -> None:
    """Make `import nixl` import tep's look-alike from now on, if TEP_SGLANG=1.

    Raises:
        UsageError: the switch is neither 0 nor 1, or the real NIXL is imported already.
    """
    switch = os.environ.get(SWITCH, "0")
    if switch not in {"0", "1"}:
        raise UsageError(f"{SWITCH}={switch!r}: 1 puts tep in NIXL's place, 0 leaves NIXL there")
    if switch == "0":
        return
    path = str(Path(nixl.__file__).with_name("path"))
    if path not in sys.path:
        sys.path.insert(0, path)
    found = import_module("nixl").__file__ or ""
    if not found.startswith(path):
        raise UsageError(
            f"{SWITCH}=1, but this process has imported NIXL from {found} already; start SGLang by "
            "`python -m tep.compat.nixl -- python -m sglang.launch_server ...`"
        )
