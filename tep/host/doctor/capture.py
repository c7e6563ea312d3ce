"""Capture the files of a machine: `python -m tep.host.doctor.capture > machine.json`."""

from __future__ import annotations

import json
import sys

from tep.host.doctor.report import capture
from tep.host.hostfiles import LiveFiles, Recorder

__all__ = ["main"]


def main() -> int:
    """Print this machine as JSON."""
    recorder = Recorder(LiveFiles())
    capture(recorder)
    json.dump(recorder.capture.to_json(), sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
