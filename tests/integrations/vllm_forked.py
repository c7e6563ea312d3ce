"""Instances of vLLM, each forked from a process that has imported it: a start takes seconds.

A program gives `Instance` a function that makes an `Engine`; the function runs in the fork. Tasks
and answers are lines of JSON, and several requests may be under way at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

WAIT_S = 300.0
_PAUSE_S = 0.001
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def prepare() -> None:
    """Import vLLM, so that forks take it along."""
    os.environ.update(ENVIRONMENT)
    import torch
    from vllm import LLMEngine

    assert LLMEngine
    torch.set_num_threads(1)


def tep_transfer(role: str, **options: object) -> dict:
    """Return the kv_transfer_config of tep's connector; the role is "prefiller" or "decoder"."""
    return {
        "kv_connector": "TepConnector",
        "kv_connector_module_path": "tep.integrations.vllm.connector",
        "kv_role": "kv_producer" if role == "prefiller" else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"name": role, **options},
    }


class Engine:
    """One instance, in this process: tasks in, answers out, one step after another."""

    def __init__(self, model: str, transfer: dict, **options: object) -> None:
        from vllm import EngineArgs, LLMEngine

        arguments = {
            "model": model,
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "seed": 0,
            "enable_prefix_caching": False,
            "max_num_seqs": 4,
            "disable_log_stats": True,
            "kv_transfer_config": transfer,
        }
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments | options))
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.pool = core.scheduler.kv_cache_manager.block_pool
        self.connector = core.scheduler.connector

    def facts(self, name: str) -> dict:
        """Return what else belongs into the answer to a request."""
        return {}

    def serve(self, tasks: queue.Queue, answer: Callable[[dict], None]) -> None:
        """Take tasks and step, for ever."""
        while True:
            with contextlib.suppress(queue.Empty):
                self.take(tasks.get(timeout=self.pause_s()), answer)
            for out in self.engine.step() if self.scheduler.has_requests() else ():
                self.show(out, answer)

    def pause_s(self) -> float:
        """Return how long to wait for a task: vLLM's own loop pauses if nothing is computed."""
        if not self.scheduler.has_requests():
            return 1.0
        return 0.0 if self.scheduler.running else _PAUSE_S

    def take(self, task: dict, answer: Callable[[dict], None]) -> None:
        """Begin a request, or count the blocks in use."""
        from vllm import SamplingParams

        if "blocks" in task:
            self.settle()
            answer({"id": task["blocks"], "used": self.used()})
            return
        sampling = SamplingParams(
            max_tokens=task["n"],
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": task["params"]} if task["params"] else None,
        )
        self.engine.add_request(task["id"], {"prompt_token_ids": task["prompt"]}, sampling)

    def show(self, out, answer: Callable[[dict], None]) -> None:
        """Answer a request that has ended."""
        if out.finished:
            first = out.outputs[0]
            answer({
                "id": out.request_id,
                "tokens": list(first.token_ids),
                "why": first.finish_reason,
                "params": out.kv_transfer_params,
                **self.facts(out.request_id),
            })  # fmt: skip

    def settle(self) -> None:
        """Step until nothing is held any more, leases included."""
        end_s = time.monotonic() + 60
        while self.scheduler.has_requests() and time.monotonic() < end_s:
            self.engine.step()

    def used(self) -> int:
        """Return the number of blocks in use; the placeholder is one."""
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()


def _live(make: Callable[[], Engine], read_fd: int, write_fd: int) -> None:
    """Run an instance's process: JSON lines in and out."""
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
    engine = make()
    answer({"id": "ready"})
    engine.serve(tasks, answer)


class Instance:
    """A forked process that runs the engine that `make` returns there."""

    def __init__(self, role: str, make: Callable[[], Engine], log: Path) -> None:
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
                _live(make, theirs, their_out)
            except BaseException:  # noqa: BLE001  # a child must not go on as its parent
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)
        os.close(theirs)
        os.close(their_out)
        self._in = os.fdopen(ours, "w")
        self._out = os.fdopen(answers)
        self._answers: dict[str, dict] = {}
        self._news, self._dead = threading.Condition(), False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._out:
            found = json.loads(line)
            with self._news:
                self._answers[found["id"]] = found
                self._news.notify_all()
        with self._news:
            self._dead = True
            self._news.notify_all()

    def tell(self, **task: object) -> None:
        """Give it a task; nothing happens if it is dead."""
        try:
            with self._news:
                self._in.write(json.dumps(task) + "\n")
                self._in.flush()
        except OSError:
            return

    def answer(self, name: str) -> dict | None:
        """Wait for the answer to a task; None: it is dead."""
        with self._news:
            known = self._news.wait_for(lambda: name in self._answers or self._dead, WAIT_S)
            if not known:
                raise TimeoutError(f"{self.role}: no answer to {name} within {WAIT_S:.0f} s")
            return self._answers.pop(name, None)

    def kill(self) -> None:
        """Kill it, at once."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
