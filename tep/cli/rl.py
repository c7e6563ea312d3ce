"""`tep rl`: plan and predict a weight update at full scale; run one between real processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tep.cli.show import (
    Guessed,
    InPath,
    Json,
    OutFile,
    Ray,
    Seed,
    emit_json,
    print_table,
    progress,
    run_on_ray,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tep import Span
    from tep.apps.rl.job import Job, RankedJob
    from tep.apps.rl.metadata import Schedule
    from tep.apps.rl.ports import UpdateReport
    from tep.apps.rl.predict import Prediction
    from tep.apps.rl.study import Deployment
    from tep.rendezvous import Place

__all__ = ["app"]

app = typer.Typer(
    help="RL weight updates: from a sharded model in training to one sharded for inference.",
    no_args_is_help=True,
)

_Model = Annotated[
    str, typer.Option("--model", help="kimi-k2, deepseek-v3, qwen3-235b, or a HF config.json.")
]


_Size = Annotated[
    int | None, typer.Option(min=1, help="Parallelism; default: as published, if it fits.")
]


@app.command("plan")
def plan(
    model: _Model = "kimi-k2",
    train: Annotated[int, typer.Option("--train", min=1, help="Training ranks.")] = 256,
    infer: Annotated[int, typer.Option("--infer", min=1, help="Inference workers.")] = 128,
    pp: _Size = None,
    ep: _Size = None,
    tp: _Size = None,
    infer_ep: _Size = None,
    infer_tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism of inference.")] = 1,
    profile: Annotated[str, typer.Option(help="A profile's name or path.")] = "efa_2x200",
    watermark_gib: Annotated[
        float, typer.Option(min=1e-6, help="Temporary memory of a rank, GiB.")
    ] = 16.0,
    output: Annotated[
        Path | None, OutFile("--output", help="Write the routing table here.")
    ] = None,
    trace: Annotated[Path | None, OutFile("--trace", help="Write a Perfetto trace here.")] = None,
    guessed: Guessed = 1.5,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Compute the routing table of an update, and say how long the update takes and why."""
    from tep.apps.rl import study
    from tep.apps.rl.models import load_model
    from tep.base.units import GiB
    from tep.sim import interval, load_profile

    sizes = {name: n for name, n in (("pp", pp), ("ep", ep), ("tp", tp)) if n is not None}
    load_profile(profile)  # refuse a wrong name before minutes of planning
    deployment = study.Deployment(
        model=load_model(model),
        train=study.train_layout(train, **sizes),
        infer=study.infer_layout(infer, infer_ep, infer_tp),
        profile=profile,
        watermark_bytes=round(watermark_gib * GiB),
    )
    with progress("planning", 2, quiet=json) as bar:
        began_s = time.process_time()
        schedule = deployment.schedule()
        bar.update(bar.task_ids[0], advance=1, description="simulating")
        found = deployment.predict(schedule, seed=seed, spans=trace is not None)
        cpu_s = time.process_time() - began_s

        def again(deployment: Deployment, seed: int) -> dict[str, float]:
            return deployment.predict(seed=seed).figures()

        ends = interval(again, found.figures(), guessed, deployment=deployment)
        document: dict[str, object] = _document(deployment, schedule, found, cpu_s) | {
            f"{name}_interval_ms": [round(end, 1) for end in each] for name, each in ends.items()
        }
        document["comparison"] = study.comparison(deployment, found)
    if output is not None:
        output.write_bytes(schedule.to_bytes())
    if trace is not None:
        _write_trace(trace, "simulated", found.spans)
    if json:
        emit_json(document)
    else:
        _print(document)


def _write_trace(path: Path, clock: Literal["host", "simulated"], spans: Iterable[Span]) -> None:
    from tep import Trace

    trace = Trace(clock)
    trace.spans += spans
    trace.write(path)


def _document(
    deployment: Deployment, schedule: Schedule, found: Prediction, cpu_s: float
) -> dict[str, object]:
    from tep.apps.rl.predict import KIMI_K2, PUBLISHED_MS

    train, infer = deployment.train, deployment.infer
    same = (deployment.model.name, train, infer, deployment.profile) == (*KIMI_K2, "efa_2x200")
    sent, received = schedule.sent_bytes(), schedule.received_bytes()
    return {
        "model": deployment.model.name,
        "shapes": deployment.model.source,
        "parameters": deployment.model.parameters,
        "train": repr(train),
        "infer": repr(infer),
        "profile": deployment.profile,
        "tasks": len(schedule.tasks),
        "writes": len(schedule.rows),
        "sent_gb": [round(float(n) / 1e9, 3) for n in (sent.min(), sent.max())],
        "received_gb": [round(float(n) / 1e9, 3) for n in (received.min(), received.max())],
        "kind": "compute is an input, the wait is predicted" if same else "extrapolated",
        "compute": "a roofline, and the time of a tensor in the published update of Kimi-K2",
        "total_ms": round(found.total_ms, 1),
        "published": PUBLISHED_MS.get(deployment.model.name),
        "stages_ms": {name: round(ms, 1) for name, ms in found.stages.items()},
        "wait_ms": round(found.wait_ms, 1),
        "links": [
            {"link": busy.name, "gb": round(busy.nbytes / 1e9, 2), "busy": round(busy.fraction, 3)}
            for busy in found.links
        ],
        "bottleneck": found.bottleneck,
        "peak_gib": round(found.peak_bytes / 2**30, 2),
        "cpu_s": round(cpu_s, 2),
        "digest": schedule.digest(),
    }


def _print(document: dict[str, object]) -> None:
    tables = {"links": "Links", "comparison": "Ways to update"}
    stages = document["stages_ms"]
    assert isinstance(stages, dict)
    plain = {k: v for k, v in document.items() if k not in {*tables, "stages_ms"} and v is not None}
    rows: list[dict[str, object]] = [
        {"what": _LABELS.get(k, k), "value": _with_unit(k, v)} for k, v in plain.items()
    ]
    print_table("Plan", ("what", "value"), rows)
    rows = [{"stage": name, "ms": ms} for name, ms in stages.items()]
    rows.append({"stage": "wait for network and ranks", "ms": document["wait_ms"]})
    print_table("One training rank", ("stage", "ms"), rows)
    for key, title in tables.items():
        found = document[key]
        assert isinstance(found, list)
        print_table(title, tuple(found[0]), found)


_LABELS = {
    "sent_gb": "sent by a training rank",
    "received_gb": "received by a worker",
    "total_ms": "in all",
    "total_interval_ms": "in all, interval",
    "wait_ms": "waiting",
    "wait_interval_ms": "waiting, interval",
    "peak_gib": "most temporary memory",
    "cpu_s": "CPU time of this program",
}
_UNITS = {"gb": "GB", "ms": "ms", "gib": "GiB", "s": "s"}


def _with_unit(key: str, value: object) -> str:
    """Write a number of the plan as people read it; its unit is the end of its key."""
    if isinstance(value, list):
        return f"{value[0]} to {value[1]} {_UNITS[key.rpartition('_')[2]]}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,} {_UNITS[key.rpartition('_')[2]]}"
    return str(value)


@app.command("run")
def run(
    weights: Annotated[
        Path, InPath("--weights", help="A safetensors file, or the folder of several.")
    ],
    model: Annotated[str, typer.Option("--model", help="Its config.json.")],
    train: Annotated[int, typer.Option("--train", min=1, help="Training processes.")] = 4,
    infer: Annotated[int, typer.Option("--infer", min=1, help="Inference processes.")] = 2,
    backend: Annotated[str, typer.Option(help="See `tep info`.")] = "libfabric",
    updates: Annotated[int, typer.Option(min=1, help="How many updates.")] = 2,
    watermark_mib: Annotated[
        int, typer.Option(min=1, help="Temporary memory of a rank, MiB.")
    ] = 64,
    trace: Annotated[Path | None, OutFile("--trace", help="Write a Perfetto trace here.")] = None,
    ray: Ray = "",
    json: Json = False,
) -> None:
    """Update real weights between real processes on this machine, and compare every byte.

    Started by torchrun or srun, once for each of 1 + --train + --infer processes, it starts none:
    rank 0 is the controller, the next ranks train, the last ones serve. With --ray the ranks are
    actors; the files must be on all nodes.
    """
    from tep.apps.rl import study
    from tep.apps.rl.job import Job, work_as_rank
    from tep.rendezvous.launch import own_address, place_here

    if ray:
        numbers = {"train": train, "infer": infer, "updates": updates, "backend": backend}
        given = {"weights": weights.resolve(), "model": model, "watermark-mib": watermark_mib}
        words = [f"--{name}={value}" for name, value in {**numbers, **given}.items()]
        words += ([f"--trace={trace.resolve()}"] if trace else []) + (["--json"] if json else [])
        run_on_ray(["rl", "run", *words], 1 + train + infer, ray, quiet=json)
    place = place_here()
    options: dict[str, str | int | list[str]] = {}
    if backend == "libfabric":
        nics: int | list[str] = 1 if place is None else [own_address(place)]
        options = {"provider": "tcp", "nics": nics}
    job = Job(
        model=str(Path(model).resolve()) if Path(model).is_file() else model,
        weights=str(weights.resolve()),
        train=study.train_layout(train),
        infer=study.infer_layout(infer),
        backend=backend,
        options=options,
    )
    if place is not None and place.rank:
        work_as_rank(job, place)
        return
    _run_here(job, place, updates, watermark_mib, trace, json=json)


def _run_here(
    job: Job,
    place: Place | None,
    updates: int,
    watermark_mib: int,
    trace: Path | None,
    *,
    json: bool,
) -> None:
    """Run the controller of a job; start its workers, unless they were started already."""
    import asyncio
    import tempfile

    from tep.apps.rl.job import LocalJob, RankedJob
    from tep.base.units import MiB

    limit = watermark_mib * MiB
    with (
        tempfile.TemporaryDirectory() as folder,
        progress("updates", updates, quiet=json) as bar,
    ):
        started = (
            LocalJob(job, folder, watermark_bytes=limit)
            if place is None
            else RankedJob(job, place, watermark_bytes=limit)
        )
        rows, reports = asyncio.run(
            _updates(started, updates, lambda: bar.advance(bar.task_ids[0]))
        )
    if trace is not None:
        _write_trace(trace, "host", [s for train in reports[-1].trains for s in train.spans])
    if json:
        train, infer = job.train.world, job.infer.world
        shown = {"backend": job.backend, "train": train, "infer": infer}
        emit_json({"job": shown, "updates": rows})
    else:
        print_table("Updates", tuple(rows[0]), rows)
        typer.echo(reports[-1].table())
    if not all(row["verified"] for row in rows):
        raise typer.Exit(1)


async def _updates(
    started: RankedJob, updates: int, tick: Callable[[], object]
) -> tuple[list[dict[str, object]], list[UpdateReport]]:
    """Start the processes, update, compare each worker's region with the checkpoint."""
    from tep.apps.rl.models import load_model, rollout_metas
    from tep.apps.rl.weights import Checkpoint, expected_digest

    job = started.job
    model, checkpoint = load_model(job.model), Checkpoint(job.weights)
    checkpoint.check(model)
    expected = {
        meta.name: expected_digest(model, checkpoint, meta)
        for meta in rollout_metas(model, job.infer)
    }
    rows: list[dict[str, object]] = []
    reports = []
    async with started as fleet:
        for version in range(1, updates + 1):
            report = await fleet.controller.update(version)
            found = {name: await actor.digest() for name, actor in fleet.rollouts.items()}
            written = sum(train.written_bytes for train in report.trains)
            rows.append(
                {
                    "version": version,
                    "ok": report.ok,
                    "seconds": round(report.elapsed_s, 3),
                    "MB written": round(written / 1e6, 1),
                    "MB gathered": round(sum(t.gathered_bytes for t in report.trains) / 1e6, 1),
                    "verified": report.ok and found == expected,
                    "error": report.error,
                }
            )
            reports.append(report)
            tick()
    return rows, reports
