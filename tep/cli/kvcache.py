"""`tep kvcache`: a disaggregated cluster, checked on the chaos fabric, sized on the timing fabric,
or run for real; and the time to the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tep.base.errors import UsageError
from tep.cli.show import (
    Guessed,
    Json,
    Ray,
    Seed,
    progress,
    refuse_unused,
    run_on_ray,
    show_rows,
    span,
)

if TYPE_CHECKING:
    from tep.apps.kvcache.cluster import Shape
    from tep.apps.kvcache.simulate import Plant, Report

__all__ = ["app"]

app = typer.Typer(
    invoke_without_command=True,
    help="Disaggregated prefill and decode: KV pages move while later layers are computed.",
)


class Fabric(StrEnum):
    """The fabric that the cluster runs on."""

    chaos = "chaos"
    timing = "timing"
    tcp = "tcp"
    local = "local"


_SHOWN = 20
_DRAWN = ("rate", "seconds", "tokens")
_LOAD = (*_DRAWN, "trace", "prefix_tokens", "profile", "guessed")
_SIZES = ("prefillers", "decoders", "tp")
_UNUSED = {
    Fabric.chaos: ("ray", "prompts", *_LOAD, *_SIZES),
    Fabric.timing: ("ray", "prompts", "scenarios"),
    Fabric.tcp: ("scenarios", *_LOAD),
    Fabric.local: ("scenarios", *_LOAD),
}
"""Options without effect, by fabric; on chaos the scenarios draw their own clusters."""

Prefillers = Annotated[int, typer.Option("--prefillers", "-p", min=1, help="Prefill instances.")]
Decoders = Annotated[int, typer.Option("--decoders", "-d", min=1, help="Decode instances.")]


@app.callback()
def kvcache(
    context: typer.Context,
    fabric: Annotated[
        Fabric,
        typer.Option(
            "--fabric",
            help="chaos: drawn scenarios, every answer compared. timing: capacity, no bytes. "
            "tcp, local: real processes, and a toy model that looks at every byte of its cache.",
        ),
    ] = Fabric.chaos,
    prefillers: Prefillers = 2,
    decoders: Decoders = 2,
    tp: Annotated[
        int | None,
        typer.Option("--tp", min=1, help="Ranks of each instance: 4, or 1 where they are real."),
    ] = None,
    rate: Annotated[
        float, typer.Option("--rate", min=1e-6, help="Requests a second; timing.")
    ] = 0.8,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1e-6, help="How long requests come; timing.")
    ] = 10.0,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Length of a prompt; timing.")
    ] = 32768,
    trace: Annotated[
        str,
        typer.Option("--trace", help="Requests of a .jsonl or .csv, or synthetic; timing."),
    ] = "",
    prefix_tokens: Annotated[
        int, typer.Option("--prefix-tokens", min=0, help="That a prefiller keeps; with --trace.")
    ] = 1 << 20,
    scenarios: Annotated[int, typer.Option("--scenarios", min=1, help="To draw; chaos.")] = 20,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="To answer; tcp, local.")] = 20,
    profile: Annotated[
        str, typer.Option("--profile", help="A profile's name or path; timing.")
    ] = "efa_2x200",
    guessed: Guessed = 1.5,
    seed: Seed = 0,
    ray: Ray = "",
    json: Json = False,
) -> None:
    """Run a cluster: a scheduler, prefillers and decoders. Exit 1 if a check fails.

    On chaos the scenarios draw their own clusters, and say which seed replays a failure. tcp and
    local, started by torchrun or srun once for each of 1 + --prefillers + --decoders processes,
    start none: rank 0 is the scheduler, the next ranks prefill, the last ones decode. With --ray
    the ranks are actors.
    """
    if context.invoked_subcommand is not None:
        return
    refuse_unused(context, f"--fabric {fabric.value}", _UNUSED[fabric])
    if fabric is Fabric.chaos:
        _check(seed, scenarios, json=json)
    elif fabric is Fabric.timing:
        from tep.apps.kvcache.simulate import Load, Plant, simulate
        from tep.apps.kvcache.traces import read_trace

        if trace:
            refuse_unused(context, "--trace", (*_DRAWN, "seed"))
        else:
            alone = "requests that share nothing; name a --trace"
            refuse_unused(context, alone, ("prefix_tokens",))
        plant = Plant(
            prefillers=prefillers,
            decoders=decoders,
            prefill_tp=tp or 4,
            decode_tp=tp or 4,
            profile=profile,
            prefix_tokens=prefix_tokens,
        )
        arrivals = read_trace(trace) if trace else []
        longest = max([one.ntokens + one.max_tokens for one in arrivals], default=tokens)
        _check_length(longest, plant, "--trace" if trace else "--tokens")
        load = Load(arrivals=arrivals, rate=rate, duration_s=seconds, ntokens=(tokens,), seed=seed)
        with progress("simulating requests", None, quiet=json):
            report = simulate(plant, load)
            if not report.completions:
                raise UsageError(
                    f"no request came within --seconds {seconds:g} at --rate {rate:g}; raise either"
                )
            ends = _ends(
                lambda plant, seed: simulate(plant, replace(load, seed=seed)),
                plant,
                report,
                guessed,
            )
        _show_report(report, ends, profile, json=json)
    else:
        _real(fabric, (prefillers, decoders, tp or 1), prompts, seed, ray, json=json)


@app.command("ttft")
def ttft(
    tokens: Annotated[
        list[int] | None, typer.Argument(help="Lengths of prompts; none: the published ones.")
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Prefiller and decoder never met before.")
    ] = False,
    guessed: Guessed = 1.5,
    json: Json = False,
) -> None:
    """Simulate one prompt's time to the first token: Qwen3-235B, TP4, H200, EFA 2 x 200 Gb/s."""
    from tep.apps.kvcache.simulate import Plant, first_token
    from tep.apps.kvcache.ttft import PUBLISHED, kind_of

    lengths = tokens or [4096, 8192, 16384, 32768, 65536, 131072]
    rows = list[dict[str, object]]()
    with progress("prompts", len(lengths), quiet=json) as bar:
        for length in lengths:
            chunks = PUBLISHED.chunks(length)
            last_s = PUBLISHED.chunk_layer_s(chunks[-1])
            plant = Plant(prefillers=1, decoders=1, cold=cold)
            found = first_token(length, plant)
            ends = _ends(partial(first_token, length), plant, found, guessed)
            rows.append(
                {
                    "tokens": length,
                    "chunks": len(chunks),
                    "layer compute ms": round(last_s * 1e3, 3),
                    "TTFT same node ms": round(PUBLISHED.compute_s(length) * 1e3, 1),
                    "TTFT disaggregated ms": round(found.ttft_s() * 1e3, 1),
                    "added ms": round(found.added_s() * 1e3, 1),
                    "added interval": span(ends["added"]),
                    "kind": kind_of(length, cold=cold),
                }
            )
            bar.advance(bar.task_ids[0])
    what = "time to the first token, simulated; five numbers are fitted to two published rows"
    show_rows(what, rows, json=json)


def _ends(
    run: Callable[[Plant, int], Report], plant: Plant, report: Report, guessed: float
) -> dict[str, tuple[float, float]]:
    from tep.sim import interval

    def again(seed: int, **changes: Any) -> dict[str, float]:
        return run(replace(plant, **changes), seed).figures()

    point = {"profile": plant.profile, "overhead": plant.overhead}
    return interval(again, report.figures(), guessed, **point)


def _check(seed: int, runs: int, *, json: bool) -> None:
    from tep.apps.kvcache.simulate import draw_scenario

    rows: list[dict[str, Any]] = []
    violations: list[str] = []
    with progress("scenarios", runs, quiet=json) as bar:
        for one in range(seed, seed + runs):
            drawn = draw_scenario(one)
            report, found = drawn.run()
            violations += [f"seed {one}: {text}" for text in found]
            rows.append(
                {
                    "seed": one,
                    "event": ", ".join(drawn.happened),
                    "ranks": f"{drawn.plant.prefill_tp} -> {drawn.plant.decode_tp}",
                    "completed": sum(done.ok for done in report.completions),
                    "failed": len(report.failed),
                    "retried": sum(done.attempts > 1 for done in report.completions),
                    "pages checked": sum(done.pages_sent for done in report.completions),
                    "violations": len(found),
                }
            )
            bar.advance(bar.task_ids[0])
    show_rows("scenarios on the chaos fabric, every answer compared", rows, json=json)
    _fail_on(violations)


def _check_length(tokens: int, plant: Plant, option: str) -> None:
    """Refuse a prompt that no decoder has room for."""
    page_tokens = plant.model.layout.page_tokens
    most = plant.npages * page_tokens
    if tokens > most:
        raise typer.BadParameter(
            f"{tokens:,} tokens do not fit into a decoder's {plant.npages:,} pages of "
            f"{page_tokens} tokens; at most {most:,}",
            param_hint=option,
        )


def _show_report(
    report: Report, ends: dict[str, tuple[float, float]], profile: str, *, json: bool
) -> None:
    from tep.sim import load_profile
    from tep.sim.sweeps import kind_of

    figures = report.figures()
    row = {
        "engines": report.engines,
        "requests": len(report.completions),
        "failed": len(report.failed),
        "TTFT p50 ms": round(figures["TTFT p50"], 1),
        "p50 interval": span(ends["TTFT p50"]),
        "TTFT p99 ms": round(figures["TTFT p99"], 1),
        "p99 interval": span(ends["TTFT p99"]),
        "beyond compute p50 ms": round(figures["added"], 3),
        "kind": kind_of(load_profile(profile)),
        "prefix hits %": round(100 * report.tokens_found / max(1, report.tokens), 1),
        "paged writes": report.writes,
        "pages": report.rows,
        "GB": round(report.nbytes / 1e9, 1),
        "simulated s": round(report.simulated_s, 2),
        "CPU s": round(report.cpu_s, 2),
        "RSS MiB": report.rss_bytes >> 20,
    }
    show_rows(f"a cluster under load ({profile})", [row], json=json)
    _fail_on([f"{done.request}: {done.reason}" for done in report.failed], "FAILED")


def _shape(fabric: Fabric, sizes: tuple[int, int, int], seed: int, address: str | None) -> Shape:
    """Make the shape of the cluster, with the NICs of this address, if one is given."""
    from tep.apps.kvcache.cluster import Shape

    prefillers, decoders, tp = sizes
    nics = {} if address is None else {"nics": [address]}
    tcp = fabric is Fabric.tcp
    return Shape(
        prefillers=prefillers,
        decoders=decoders,
        prefill_tp=tp,
        decode_tp=tp,
        backend="libfabric" if tcp else "local",
        options={"provider": "tcp", **nics} if tcp else {},
        seed=seed,
    )


def _real(
    fabric: Fabric, sizes: tuple[int, int, int], count: int, seed: int, ray: str, *, json: bool
) -> None:
    import asyncio

    import numpy as np

    from tep.apps.kvcache.cluster import Cluster, RankedCluster, work_as_rank
    from tep.apps.kvcache.toy import ToyModel
    from tep.rendezvous.launch import own_address, place_here

    prefillers, decoders, tp = sizes
    model = ToyModel(seed=seed)
    if model.heads % tp:
        raise typer.BadParameter(
            f"the toy model has {model.heads} heads, which {tp} ranks cannot share evenly; "
            "1, 2 and 4 can",
            param_hint="--tp",
        )
    if ray:
        numbers = {"prefillers": prefillers, "decoders": decoders, "tp": tp, "prompts": count}
        given = {"fabric": fabric.value, **numbers, "seed": seed}
        words = [f"--{name}={value}" for name, value in given.items()] + ["--json"] * json
        run_on_ray(["kvcache", *words], 1 + prefillers + decoders, ray, quiet=json)
    place = place_here()
    address = None if place is None else own_address(place)
    shape = _shape(fabric, sizes, seed, address)
    if place is not None and place.rank:
        work_as_rank(shape, place)
        return
    dice = np.random.default_rng(seed)
    prompts = [dice.integers(0, 256, n).astype(np.int32) for n in dice.integers(1, 200, count)]

    async def run() -> list[Any]:
        started = Cluster(shape) if place is None else RankedCluster(shape, place)
        async with started as cluster:
            return list(await cluster.generate(prompts, 12))

    with progress("processes are answering", None, quiet=json):
        found = asyncio.run(run())
    rows, wrong = list[dict[str, object]](), []
    for ids, done in zip(prompts, found, strict=True):
        same = done.ok and list(done.tokens) == model.alone(ids, 12)
        if not same:
            wrong.append(f"{done.request}: {done.reason or 'other tokens than in one place'}")
        rows.append(
            {
                "request": done.request,
                "tokens": len(ids),
                "prefiller": done.prefiller,
                "attempts": done.attempts,
                "pages": done.pages_sent,
                "TTFT ms": round(done.ttft_s * 1e3, 1),
                "same tokens": same,
            }
        )
    what = f"{prefillers} prefillers and {decoders} decoders, processes over {fabric.value}"
    show_rows(what, rows, json=json)
    _fail_on(wrong)


def _fail_on(violations: Sequence[str], word: str = "VIOLATION") -> None:
    for text in violations[:_SHOWN]:
        typer.echo(f"{word}: {text}", err=True)
    if len(violations) > _SHOWN:
        typer.echo(f"and {len(violations) - _SHOWN} more; --json has all rows", err=True)
    if violations:
        raise typer.Exit(1)
