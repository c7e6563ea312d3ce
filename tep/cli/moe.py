"""`tep moe`: predict the latency of MoE dispatch and combine, with its parts; compare schemes;
check every byte of drawn layers on the chaos fabric.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from tep.cli.show import (
    Guessed,
    Json,
    Seed,
    emit_json,
    print_table,
    progress,
    refuse_unused,
    span,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tep.apps.moe.predict import Prediction, Workload
    from tep.sim import Profile

__all__ = ["moe"]

Private = Annotated[
    int, typer.Option("--private", min=0, help="Tokens to each peer before routes are known.")
]
SlowNic = Annotated[
    float,
    typer.Option("--slow-nic", min=1.0, help="Rank 0's first NIC takes so many times as long."),
]
Nics = Annotated[int | None, typer.Option("--nics", min=1, help="NICs of a GPU.")]
Prefill = Annotated[bool, typer.Option("--prefill", help="4096 tokens a rank, not 128.")]
Turns = Annotated[int | None, typer.Option("--turns", min=1, help="None: 64 latencies or more.")]
Skew = Annotated[float, typer.Option("--skew", min=0.0, help="0 = even; Zipf exponent.")]


_EP_PUBLISHED: Final = 128
"""The most ranks whose times are published."""


def moe(
    context: typer.Context,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Ranks, one GPU each.")] = 64,
    nic: Annotated[
        str, typer.Option("--nic", help="cx7, efa, efa_p5, or a profile's name or path.")
    ] = "cx7",
    prefill: Prefill = False,
    tokens: Annotated[int | None, typer.Option("--tokens", min=0, help="Of each rank.")] = None,
    topk: Annotated[int, typer.Option("--topk", min=1, help="Experts of a token.")] = 8,
    experts: Annotated[int, typer.Option("--experts", min=1, help="In all.")] = 256,
    hidden: Annotated[int, typer.Option("--hidden", min=1, help="Elements of a token.")] = 7168,
    private: Private = 256,
    nics: Nics = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs of a node.")] = 8,
    skew: Skew = 0.0,
    slow_nic: SlowNic = 1.0,
    by_bytes: Annotated[
        bool, typer.Option("--by-bytes", help="Share the first burst over all NICs, too.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Other ways on the same machine, side by side.")
    ] = False,
    turns: Turns = None,
    check: Annotated[
        int, typer.Option("--check", min=0, help="Instead: check so many drawn layers.")
    ] = 0,
    guessed: Guessed = 1.5,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Predict p50 of dispatch and combine: the product's own all-to-all in simulated time."""
    if check:
        others = set(context.params) - {"check", "seed", "json"}
        refuse_unused(context, "--check, which draws its own layers", sorted(others))
        _check(seed, check, json=json)
        return
    from tep.apps.moe.predict import Workload, predict

    workload = Workload(
        ep=ep,
        nic=nic,
        tokens=tokens if tokens is not None else 4096 if prefill else 128,
        topk=topk,
        experts=experts,
        hidden=hidden,
        scales=-(-hidden // 128),
        private_tokens=private,
        gpus=gpus,
        nics=nics,
        skew=skew,
        slow_nic=slow_nic,
        seed=seed,
        private_scatter="bytes" if by_bytes else "peers",
        turns=1 if prefill and turns is None else turns,
    )
    if compare:
        _compare(workload, guessed, json=json)
    else:
        with progress("simulating the layer", None, quiet=json):
            found = _run(predict, workload, guessed)
        _show(*found, json=json)


def _run(
    way: Callable[..., Prediction], workload: Workload, guessed: float
) -> tuple[Prediction, dict[str, tuple[float, float]], str]:
    """Return a prediction, the intervals of its figures, and its kind."""
    from dataclasses import replace

    from tep.apps.moe.kernels import load_gpu
    from tep.apps.moe.predict import family_of, predict, profile_of
    from tep.sim.sweeps import interval

    machine, gpu = profile_of(workload), load_gpu(family_of(workload))
    found = way(workload, machine=machine, gpu=gpu)
    ends = interval(
        lambda seed, **point: way(replace(workload, seed=seed), **point).figures(),
        found.figures(),
        guessed,
        machine=machine,
        gpu=gpu,
    )
    return found, ends, _kind(workload, machine, published=way is predict)


def _kind(workload: Workload, machine: Profile, *, published: bool) -> str:
    """Say how the latencies are made: as the tables say, if those of this way are published."""
    from tep.apps.moe.predict import Workload
    from tep.bench.reproduce.tables import NIC_PROFILES, load_table
    from tep.sim.sweeps import kind_of

    ep, tokens = workload.ep, workload.tokens
    usual = Workload(
        ep=ep, nic=workload.nic, tokens=tokens, turns=workload.turns, seed=workload.seed
    )
    steps = {128: ("moe-decode", "moe-others"), 4096: ("moe-prefill",)}
    tables = steps.get(tokens, ()) if published and workload == usual else ()
    kinds = {
        point.kind
        for name in tables
        for point in load_table(name).points
        if (str(ep), machine.name) == (point.keys["ep"], NIC_PROFILES.get(point.keys["nic"]))
    }
    if ep > _EP_PUBLISHED or kind_of(machine) == "extrapolated":
        return "extrapolated"
    return "fitted" if "fitted" in kinds else "predicted"


def _title(workload: Workload) -> str:
    return (
        f"EP{workload.ep}, {workload.nic}, {workload.tokens} tokens a rank, "
        f"top {workload.topk} of {workload.experts}"
    )


def _show(
    found: Prediction, ends: dict[str, tuple[float, float]], kind: str, *, json: bool
) -> None:
    workload = found.workload
    halves = {
        "dispatch": (found.dispatch_us, found.p99_us[0], found.dispatch_parts),
        "combine": (found.combine_us, found.p99_us[1], found.combine_parts),
    }
    if json:
        document: dict[str, object] = {
            "ep": workload.ep,
            "nic": workload.nic,
            "tokens": workload.tokens,
            "private": workload.private_tokens,
            "seed": workload.seed,
            "barrier_us": found.barrier_us,
            "kind": kind,
        }
        for half, (p50, p99, parts) in halves.items():
            interval = {"interval_us": ends[half], "p99_interval_us": ends[f"{half} p99"]}
            document[half] = {"p50_us": p50, "p99_us": p99, "parts_us": parts, **interval}
        emit_json(document)
        return
    names = dict.fromkeys(name for _, _, parts in halves.values() for name in parts)
    rows = [
        {"us": half, "p50": f"{p50:.1f}", "interval": span(ends[half]), "p99": f"{p99:.1f}"}
        | {name: f"{us:.1f}" for name, us in parts.items()}
        for half, (p50, p99, parts) in halves.items()
    ]
    print_table(_title(workload), ["us", "p50", "interval", "p99", *names], rows)
    barrier = f"a barrier: {found.barrier_us:.1f} us"
    typer.echo(f"{barrier}, in neither; buffers of the next step wait for it")
    typer.echo(f"{kind}; p99 is too low on EFA, where the network's tails are not modelled")


def _compare(workload: Workload, guessed: float, *, json: bool) -> None:
    from tep.apps.moe.predict import ways

    runs, found = ways(workload), {}
    with progress("ways to do it", len(runs), quiet=json) as bar:
        for name, way, one in runs:
            found[name] = _run(way, one, guessed)
            bar.advance(bar.task_ids[0])
    halves = ("dispatch", "combine")
    if json:
        emit_json(
            [
                {"name": name, "kind": kind}
                | {f"{half}_us": one.figures()[half] for half in halves}
                | {f"{half}_interval_us": ends[half] for half in halves}
                for name, (one, ends, kind) in found.items()
            ]
        )
        return
    rows = [
        {"p50, us": name, "kind": kind}
        | {half: f"{one.figures()[half]:.1f} ({span(ends[half])})" for half in halves}
        for name, (one, ends, kind) in found.items()
    ]
    print_table(_title(workload), ["p50, us", *halves, "kind"], rows)


def _check(seed: int, count: int, *, json: bool) -> None:
    """Run drawn layers and compare every byte; a mismatch is an error that prints the layer."""
    from tep.apps.moe.trial import Mismatch, draw_trial, run_trial

    with progress("layers", count, quiet=json) as bar:
        for number in range(seed, seed + count):
            try:
                run_trial(draw_trial(number))
            except Mismatch as wrong:
                typer.echo(f"seed {number}: {wrong}", err=True)
                raise typer.Exit(1) from wrong
            bar.advance(bar.task_ids[0])
    if json:
        emit_json({"layers": count, "seed": seed, "wrong": 0})
    else:
        typer.echo(f"{count} layers from seed {seed}: every byte equals the dense reference")
