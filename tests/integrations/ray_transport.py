"""Tensors between Ray's actors by the transport TEP: whole, given back, and no hang when one dies.

Run by scripts/integrations.py in an environment that has Ray and torch. The program of the how-to,
with its sender and receiver, runs first, as it stands there.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import ray
import ray_nodes
import torch

from tep.integrations.ray import transport

MIB, WAIT_S, NODES = 2**20, 120, 2
transport.register()


def drawn(seed: int) -> list[torch.Tensor]:
    """Tensors of several shapes and dtypes; some are empty, one has no dimension."""
    dice = torch.Generator().manual_seed(seed)
    return [
        torch.rand(16 * MIB // 4, generator=dice),
        torch.rand((33, 7), generator=dice).to(torch.bfloat16),
        torch.empty((0, 5)),
        torch.rand((), generator=dice).double(),
        torch.randint(0, 2, (129,), generator=dice).bool(),
        torch.rand((3, 5, 7), generator=dice).to(torch.float8_e4m3fn),
    ]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Return True if tensors are equal, byte for byte."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and transport._bytes(a).equal(transport._bytes(b))
        for a, b in zip(one, other)
    )


@ray.remote(num_cpus=1, enable_tensor_transport=True)
class Actor:
    """Makes and takes tensors."""

    @ray.method(tensor_transport="TEP")
    def make(self, seed):
        """Tensors that stay here until somebody pulls them."""
        return drawn(seed)

    def takes(self, seed, tensors):
        """Return True if they came as they were made."""
        return same(tensors, drawn(seed))

    def pid(self):
        """Return its process id."""
        return os.getpid()

    def regions(self):
        """Return the number of regions of its engine."""
        puller = ray.experimental.rdt.util.get_tensor_transport_manager("TEP").puller()
        return len(puller.engine._machine.regions)


def until_none(actor) -> None:
    """Wait until an actor has given back all memory."""
    end_s = time.monotonic() + WAIT_S
    while ray.get(actor.regions.remote(), timeout=WAIT_S):
        assert time.monotonic() < end_s, "memory of objects that are gone is still registered"
        threading.Event().wait(0.1)


def run(cluster) -> dict[str, object]:
    """Move tensors; kill an actor while others wait for its tensors."""
    ray.init(cluster.address, log_to_driver=False)
    source, sink = Actor.remote(), Actor.remote()
    for seed in range(3):
        refs = source.make.remote(seed)
        assert ray.get(sink.takes.remote(seed, refs), timeout=WAIT_S)
        assert same(drawn(seed), ray.get(refs, timeout=WAIT_S)), "the driver's copy"
    mine = drawn(9)
    refs = source.make.remote(9)
    targets = [torch.zeros_like(tensor) for tensor in mine]
    ray.experimental.set_target_for_ref(refs, targets)
    assert same(mine, ray.get(refs, timeout=WAIT_S))
    assert same(mine, targets), "the given tensors were not used"
    del refs
    until_none(source)
    until_none(sink)

    refs = source.make.remote(5)
    ray.wait([refs], timeout=WAIT_S)
    os.kill(ray.get(source.pid.remote(), timeout=WAIT_S), signal.SIGKILL)
    try:
        ray.get(sink.takes.remote(5, refs), timeout=WAIT_S)
        raise AssertionError("tensors of a dead actor came")
    except ray.exceptions.GetTimeoutError:
        raise AssertionError("tensors of a dead actor hang") from None
    except ray.exceptions.RayError as error:
        told = type(error).__name__
    fresh = Actor.remote()
    assert ray.get(sink.takes.remote(6, fresh.make.remote(6)), timeout=WAIT_S), "the sink is lost"
    until_none(sink)
    return {
        "how-to": "ran",
        "tensors": "6 dtypes and shapes, 16 MiB and less",
        "a dead actor": told,
    }


def howto() -> None:
    """Run the program of the how-to, with a Ray of its own."""
    page = Path(__file__).resolve().parents[2] / "docs" / "howto" / "ray.md"
    blocks = re.findall(
        r"^``` \{ \.python \}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    (program,) = [block for block in blocks if "class Trainer" in block]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(program, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(file)], stdout=subprocess.PIPE, text=True, timeout=600, check=True
        )
    (said,) = re.findall(r"# ([0-9.]+)$", program, re.MULTILINE)
    assert said == done.stdout.split()[-1], done.stdout


def main() -> int:
    """Print the result."""
    howto()
    with ray_nodes.nodes(NODES) as (cluster, _):
        found = run(cluster)
    sys.stdout.write(json.dumps({"ok": True, **found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
