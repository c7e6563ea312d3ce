"""vLLM with two tensor parallel ranks an instance, or one, under tep's connector.

Each prefiller's answer goes to the decoder, whose tokens must equal those that it computes alone.
The model has two heads of keys and values: with two ranks each holds one of them, and a rank of one
side reads from both of the other where these are one and two. Run by scripts/integrations.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import vllm_forked
from small_llama import make_model
from vllm_forked import Instance, prepare, tep_transfer
from vllm_nixl import REMOTE
from vllm_tep import prompt_of

NEW, PROMPTS = 6, 4


class Engine(vllm_forked.Engine):
    """An instance whose answers say how many blocks of prompts it has loaded so far."""

    def __init__(self, name: str, model: str, ranks: int) -> None:
        # A load whose bytes differ would fail, and be computed again.
        transfer = tep_transfer(name, backend="local", checksums=True)
        transfer["kv_role"] = "kv_both"
        super().__init__(model, transfer, max_num_batched_tokens=128, tensor_parallel_size=ranks)
        self.loaded = 0
        real = self.connector.update_connector_output

        def update(output) -> None:
            done = set(output.finished_recving or ())
            self.loaded += len(done) * (not output.invalid_block_ids)
            real(output)

        self.connector.update_connector_output = update

    def facts(self, name: str) -> dict:
        """Return the number of complete loads so far."""
        return {"loaded": self.loaded}


def ask(side: Instance, name: str, prompt: list[int], n: int, params: object) -> dict:
    """Send a request, and wait for its answer."""
    side.tell(id=name, prompt=prompt, n=n, params=params)
    found = side.answer(name)
    if found is None:
        raise RuntimeError(f"{side.role} is dead; see its log")
    return found


def play(sides: dict[str, Instance], source: str, sink: str) -> tuple[int, int]:
    """Have prompts prefilled here and decoded there; count equal answers, and loads."""
    equal = loaded = 0
    for k in range(PROMPTS):
        prompt, name = prompt_of(k), f"{source}-{sink}-{k}"
        alone = ask(sides[sink], f"{name}-alone", prompt, NEW, None)
        first = ask(sides[source], f"{name}-first", prompt, 1, REMOTE)
        found = ask(sides[sink], name, prompt, NEW, first["params"])
        equal += found["tokens"] == alone["tokens"]
        loaded += found["loaded"] - alone["loaded"]
    return equal, loaded


def main() -> int:
    """Run all pairs; the last line is a JSON object with what was found."""
    prepare()
    found: dict[str, object] = {}
    good = True
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        model = str(Path(folder) / "model")
        sizes = {"a": 2, "b": 2, "c": 1}
        sides = {
            name: Instance(name, lambda n=name: Engine(n, model, sizes[n]), Path(f"{name}.log"))
            for name in sizes
        }
        try:
            for name, side in sides.items():
                if side.answer("ready") is None:
                    raise RuntimeError(f"{name} did not start; see {name}.log")
            for source, sink in (("a", "b"), ("a", "c"), ("c", "b")):
                equal, loaded = play(sides, source, sink)
                what = f"{sizes[source]} ranks to {sizes[sink]}"
                found[what] = f"{equal} of {PROMPTS} equal, {loaded} loaded"
                good = good and equal == loaded == PROMPTS
        finally:
            for side in sides.values():
                side.kill()
    sys.stdout.write(json.dumps({**found, "ok": good}) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
