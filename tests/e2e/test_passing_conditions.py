"""A process that is short of something for a while is reached again, or the error says how."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

import tep
from tests.support.here import require
from tests.support.ranks import outcomes, start_rank

WAIT_S = 60.0

RECEIVER = """
import json, os, resource, sys
import numpy as np
import tep
engine = tep.TransferEngine.open(name="receiver", **json.loads(sys.argv[1]))
_, desc = engine.reg_mr(np.zeros(64, np.uint8))
print(desc.to_bytes().hex(), flush=True)
hogs, hard = [], resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for line in sys.stdin:
    if line == "short\\n":
        soft = len(os.listdir("/proc/self/fd")) + 9
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        try:
            while True:
                hogs.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
    elif line == "rich\\n":
        while hogs:
            os.close(hogs.pop())
    print("ok", flush=True)
"""

BACKENDS = {
    "local": {"backend": "local"},
    "tcp": {"backend": "libfabric", "provider": "tcp", "nics": ["127.0.0.1"], "peer_timeout_s": 2},
}


@pytest.fixture(params=BACKENDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param != "local":
        require(request.param)
    return str(request.param)


@pytest.fixture
def receiver(kind: str) -> Iterator[tuple[subprocess.Popen[str], tep.MrDesc]]:
    options = json.dumps(BACKENDS[kind])
    process = start_rank("-c", RECEIVER, options, stdin=subprocess.PIPE)
    try:
        yield process, tep.MrDesc.from_bytes(bytes.fromhex(process.stdout.readline()))
    finally:
        process.kill()
        outcomes([process])


def tell(process: subprocess.Popen[str], word: str) -> None:
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    assert "ok\n" == process.stdout.readline()


class Sender:
    """An engine that writes to one target, each time under another immediate."""

    def __init__(self, kind: str, desc: tep.MrDesc) -> None:
        self.engine = tep.TransferEngine.open(**BACKENDS[kind])
        self._mr, _ = self.engine.reg_mr(np.ones(64, np.uint8))
        self._desc, self._imm = desc, 0

    def write(self) -> str:
        """Write once; "", or the error."""
        self._imm += 1
        sent = self.engine.submit_single_write(64, (self._mr, 0), (self._desc, 0), imm=self._imm)
        try:
            sent.wait(WAIT_S)
        except tep.FabricError as error:
            return f"{error.code}: {error}"
        return ""


@pytest.mark.slow
def test_a_receiver_that_was_short_of_descriptors_is_reached_again(kind, receiver) -> None:
    """A sender that called meanwhile took it for dead, for ever; all others went on."""
    process, desc = receiver
    old, new = Sender(kind, desc), Sender(kind, desc)
    with old.engine, new.engine:
        assert "" == old.write()
        tell(process, "short")
        said = new.write()
        assert said.startswith("UNREACHABLE")
        assert "ulimit -n" in said or kind == "tcp"
        assert "" == old.write()
        tell(process, "rich")
        assert "" == old.write()
        for _ in range(5):  # tcp asks again after a while
            said = new.write()
            if not said:
                break
        assert "" == said
        new.engine.remove_peer(desc.addr).wait(WAIT_S)
        assert "" == new.write()
