"""NIXL's own Python tests and examples, unchanged, on tep.

Run by scripts/integrations.py, which has cloned NIXL's sources into `sources` beside the
environment. Tests that want GPUs or storage are skipped by themselves, and listed; the examples of
storage and of telemetry's files are left out. The last line on stdout is a JSON object with `ok`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

SOURCES = Path("sources").resolve()
ON_TEP = [sys.executable, "-m", "tep.compat.nixl", "--", sys.executable]
PAIRS = ("basic_two_peers.py", "expanded_two_peers.py")
WAIT_S = 600.0


def start(example: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start an example; what it says goes to the log."""
    path = SOURCES / "examples" / "python" / example
    return subprocess.Popen([*ON_TEP, str(path), *arguments], stdout=sys.stderr, cwd=path.parent)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def listens(port: int) -> bool:
    """Return True if somebody listens on a port."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def pair(example: str) -> bool:
    """Run an example of two processes as its README does: the target first."""
    port = free_port()
    place = ("--ip", "127.0.0.1", "--port", str(port))
    target = start(example, "--mode", "target", *place)
    try:
        end_s = time.monotonic() + WAIT_S
        while not listens(port):
            with contextlib.suppress(subprocess.TimeoutExpired):
                target.wait(0.2)
                return False
            if time.monotonic() > end_s:
                return False
        initiator = start(example, "--mode", "initiator", *place)
        return initiator.wait(WAIT_S) == target.wait(WAIT_S) == 0
    finally:
        target.kill()


def tests() -> tuple[bool, str, list[str]]:
    """Run NIXL's tests; return whether none failed, counts, and why some were skipped."""
    alone = ("-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider")  # without tep's settings
    command = [*ON_TEP, "-m", "pytest", "-q", "-rs", "--color=no", *alone, "."]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=SOURCES / "test" / "python",
        timeout=WAIT_S,
        check=False,
    )
    sys.stderr.write(done.stdout + done.stderr)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|error)", done.stdout)
    skipped = re.findall(r"^SKIPPED \[\d+\] (.{1,80})", done.stdout, re.MULTILINE)
    return done.returncode == 0, ", ".join(counts), skipped


def main() -> int:
    """Run everything; print the result."""
    os.environ.setdefault("TEP_NIXL_BACKEND", "local")
    os.environ["NIXL_ETCD_ENDPOINTS"] = ""  # the third example deletes it
    good, counts, skipped = tests()
    examples = {name: pair(name) for name in PAIRS}
    ports = (f"--init-port={free_port()}", f"--target-port={free_port()}")
    examples["partial_md_example.py"] = start("partial_md_example.py", *ports).wait(WAIT_S) == 0
    result = {
        "ok": good and " passed" in counts and all(examples.values()),
        "tests": counts,
        "skipped by themselves": "; ".join(skipped),
        "examples that ran": [name for name, ran in examples.items() if ran],
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
