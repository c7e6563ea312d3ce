"""`tep moe`: predict the latency of MoE dispatch and combine, with its parts."""

from __future__ import annotations

from typing import Annotated

import typer

from tep.cli.show import Json, Seed, emit_json, print_table

__all__ = ["moe"]


def moe(
    ep: Annotated[int, typer.Option("--ep", min=1, help="Ranks, one GPU each.")] = 64,
    nic: Annotated[str, typer.Option("--nic", help="cx7, efa, efa_p5, or a profile.")] = "cx7",
    prefill: Annotated[
        bool, typer.Option("--prefill", help="4096 tokens a rank, not 128.")
    ] = False,
    tokens: Annotated[int | None, typer.Option("--tokens", min=0, help="Of each rank.")] = None,
    topk: Annotated[int, typer.Option("--topk", min=1, help="Experts of a token.")] = 8,
    experts: Annotated[int, typer.Option("--experts", min=1, help="In all.")] = 256,
    hidden: Annotated[int, typer.Option("--hidden", min=1, help="Elements of a token.")] = 7168,
    private: Annotated[
        int, typer.Option("--private", min=0, help="Tokens to each peer before routes are known.")
    ] = 256,
    nics: Annotated[int | None, typer.Option("--nics", min=1, help="NICs of a GPU.")] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs of a node.")] = 8,
    skew: Annotated[float, typer.Option("--skew", min=0.0, help="0 = even; Zipf exponent.")] = 0.0,
    by_bytes: Annotated[
        bool, typer.Option("--by-bytes", help="Share the first burst over all NICs, too.")
    ] = False,
    node_sums: Annotated[
        bool, typer.Option("--node-sums", help="Add results up at the sending node.")
    ] = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Predict p50 of dispatch and combine: the product's own all-to-all in simulated time."""
    from tep.apps.moe.predict import Workload, predict  # numpy is loaded when something runs

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
        seed=seed,
        private_scatter="bytes" if by_bytes else "peers",
        sums="node" if node_sums else "token",
    )
    found = predict(workload)
    halves = {
        "dispatch": (found.dispatch_us, found.p99_us[0], found.dispatch_parts),
        "combine": (found.combine_us, found.p99_us[1], found.combine_parts),
    }
    if json:
        document = {
            half: {"p50_us": p50, "p99_us": p99, "parts_us": parts}
            for half, (p50, p99, parts) in halves.items()
        }
        emit_json(
            {"ep": ep, "nic": nic, "tokens": workload.tokens, "private": private, "seed": seed}
            | document
            | {"barrier_us": found.barrier_us}
        )
        return
    names = dict.fromkeys(name for _, _, parts in halves.values() for name in parts)
    columns = ["us", "p50", "p99", *names]
    print_table(
        f"EP{ep}, {nic}, {workload.tokens} tokens a rank, top {topk} of {experts}",
        columns,
        [
            {"us": half, "p50": f"{p50:.1f}", "p99": f"{p99:.1f}"}
            | {name: f"{us:.1f}" for name, us in parts.items()}
            for half, (p50, p99, parts) in halves.items()
        ],
    )
    typer.echo(f"a barrier: {found.barrier_us:.1f} us, hidden behind the experts")
