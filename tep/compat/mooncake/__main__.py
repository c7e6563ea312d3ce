"""Run a program on this look-alike: python -m tep.compat.mooncake -- COMMAND."""

from __future__ import annotations

import sys
from pathlib import Path

from tep.compat.nixl.__main__ import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).with_name("path")))
