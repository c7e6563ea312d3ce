"""Run a program with this look-alike in NIXL's place: python -m tep.compat.nixl -- COMMAND."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

__all__ = ["main"]

_PATH = Path(__file__).with_name("path")
_USAGE = """usage: python -m tep.compat.nixl -- COMMAND [ARGUMENT ...]
       python -m tep.compat.mooncake -- COMMAND [ARGUMENT ...]

COMMAND and all that it starts import `nixl`, or `mooncake.engine`, from tep. TEP_NIXL_BACKEND names
the backend (default: auto), TEP_NIXL_OPTIONS its options as JSON, e.g.
'{"provider": "tcp", "nics": ["127.0.0.1"]}'.
"""


def main(argv: list[str], path: Path = _PATH) -> int:
    """Replace this process by the command, with `path` before others; return if that fails."""
    command = argv[1:] if argv[:1] == ["--"] else []
    if not command:
        sys.stderr.write(_USAGE)
        return 2
    program = shutil.which(command[0])
    if program is None:
        sys.stderr.write(f"tep.compat.nixl: there is no program {command[0]!r}\n")
        return 127
    paths = [str(path), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    sys.stdout.flush()
    return os.execv(program, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
