"""Writing down what a machine says of itself: `python -m tep.doctor.capture > machine.json`."""

from __future__ import annotations

import json
import sys

from tep.hostfiles import LiveFiles, Recorder
from tep.topology import detect

__all__ = ["capture", "main"]


def capture(recorder: Recorder) -> dict[str, object]:
    """Ask all that topology and doctor ask, and return the answers."""
    detect(recorder)
    return recorder.capture.to_json()


def main() -> int:
    """Print this machine as JSON."""
    json.dump(capture(Recorder(LiveFiles())), sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
