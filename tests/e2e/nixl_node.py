"""A program that knows NIXL only: a peer that owns memory, in a process of its own. Not a test.

It prints its metadata, then takes lines: "add HEX", "notifs N", "write ADDRESS", "end".
"""

from __future__ import annotations

import json
import sys

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config
from nixl._bindings import nixlXferTelemetry  # as vLLM imports it

NBYTES = 1 << 20


def main() -> int:
    agent = nixl_agent("node", nixl_agent_config(backends=["UCX"], capture_telemetry=True))
    memory = np.arange(NBYTES // 4, dtype=np.uint32)
    at = memory.ctypes.data
    agent.register_memory([(at, NBYTES, 0, "")], "DRAM")
    say({"at": at, "metadata": agent.get_agent_metadata().hex()})
    for line in sys.stdin:
        what, *words = line.split()
        if what == "add":
            say(agent.add_remote_agent(bytes.fromhex(words[0])).decode())
        elif what == "notifs":
            while sum(map(len, agent.update_notifs().values())) < int(words[0]):
                pass
            say({name: [m.decode() for m in found] for name, found in agent.notifs.items()})
        elif what == "write":
            mine = agent.get_xfer_descs([(at, NBYTES, 0)], "DRAM")
            theirs = agent.get_xfer_descs([(int(words[0]), NBYTES, 0)], "DRAM")
            handle = agent.initialize_xfer("WRITE", mine, theirs, "test", b"pushed")
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            told = agent.get_xfer_telemetry(handle)
            assert isinstance(told, nixlXferTelemetry)
            say([state, told.totalBytes])
        else:
            break
    return 0


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
