"""Measure by the project's own commands, and write docs/benchmarks.md and its pages.

No figure is typed: each table comes from a file of docs/data, which this program writes from the
output of a command. The command itself describes its measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tep import UsageError, __version__

__all__ = ["BENCHES", "main", "pages"]

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
DATA: Final = DOCS / "data"
_LIMIT_S: Final = 3600

Row = dict[str, object]


def figure_rows(data: Any) -> list[Row]:
    """Return the figures that a program of tests/bench prints."""
    return [
        {
            "what": one["what"],
            "median": f"{_number(one['value'])} {one['unit']}",
            "best": _number(one["best"]),
            "aim": _aim(one),
            "compared to": _compared(one),
        }
        for one in data["figures"]
    ]


def _engine(data: Any) -> list[Row]:
    """Return the figures of bench_engine, each beside a loop of the same run."""
    rows = zip(figure_rows(data), data["figures"], strict=True)
    return [
        {"what": row["what"], "median": row["median"], "in method calls": _number(one["calls"])}
        | {name: row[name] for name in ("best", "aim", "compared to")}
        for row, one in rows
    ]


def _busy(data: Any) -> list[Row]:
    """Return the figures of bench_busy, with their worst rounds."""
    worst = {one["what"]: _number(one["worst"]) for one in data["figures"]}
    return [
        {"what": row["what"], "median": row["median"], "best": row["best"]}
        | {"worst": worst[str(row["what"])], "aim": row["aim"]}
        for row in figure_rows(data)
    ]


def _aim(one: Mapping[str, Any]) -> str:
    if one["aim"] is None:
        return ""
    sign = "at least" if one["more_is_better"] else "at most"
    return f"{sign} {_number(one['aim'])}: {'reached' if one['reached'] else '**missed**'}"


def _compared(one: Mapping[str, Any]) -> str:
    if one["ratio"] is None:
        return ""
    return f"{one['ratio']:.2f} x {_number(one['reference'])} ({one['reference_source']})"


def _published(data: Any) -> list[Row]:
    """Make the table of bench_published."""
    fixed = {"table", "unit", "published", "simulated", "interval", "error", "left_out"}
    fixed |= {"class", "of", "tolerance", "holds"}
    rows: list[Row] = []
    for one in data["points"]:
        keys = {k: v for k, v in one.items() if k not in fixed}
        points = "points" if one["unit"] == "%" else "%"
        rows.append(
            {
                "table": f"{one['table']}, {one['unit']}",
                "point": ", ".join(f"{k} {v}" for k, v in keys.items()),
                "published": _number(one["published"]),
                "simulated": "" if one["simulated"] is None else _number(one["simulated"]),
                "interval": " to ".join(map(_number, one["interval"] or ())),
                "error": "" if one["error"] is None else f"{one['error']:+.1f} {points}",
                "left out": _left_out(one),
                "class": one["class"],
                "to or by what": one["of"],
            }
        )
    return rows


def _left_out(one: Mapping[str, Any]) -> str:
    """Write the error of a point that is left out."""
    if one["left_out"] is None:
        return "nothing left" if one["class"] in {"fitted", "given"} else ""
    if one["unit"] == "%":
        return f"{one['left_out'] - one['published']:+.1f} points"
    return f"{100 * (one['left_out'] / one['published'] - 1):+.1f} %"


def _scale(data: Any) -> list[Row]:
    """Return the runs of bench_scale."""
    return [
        {
            "what": one["what"],
            "CPU, s": _number(one["cpu_s"]),
            "aim": _aim({**one, "aim": one["aim_s"], "more_is_better": False}),
            "memory, GiB": f"{one['memory_gib']:.2f}",
            "events": _shown(one["events"]),
            "loop, ns": _number(one["loop_ns"]),
            "result": one["result"],
        }
        for one in data["runs"]
    ]


def _peers(data: Any) -> list[Row]:
    """Return the rows of bench_peers."""
    rows: list[Row] = []
    for one in data["rows"]:
        row: Row = {"who": one["who"], "version": one["about"], "what": one["what"]}
        if one["median"] is not None:
            row["median"] = f"{_number(one['median'])} {one['unit']}"
            row["least to most"] = f"{_number(one['least'])} to {_number(one['most'])}"
            row["CPU, ms"] = _number(one["cpu_ms"])
        if one["ratio"] is not None and one["who"] != "tep":
            row["ratio to tep"] = _spread(one["ratio"])
        row["absent"] = one["absent"]
        rows.append(row)
    return rows


def _beside(data: Any) -> list[Row]:
    """Return the rows of vllm_pace: tep, NIXL, and the ratio of the two in the same round."""
    rows: list[Row] = []
    for one in data["rows"]:
        spreads = {name: _spread(one[name]) for name in ("tep", "nixl", "ratio")}
        rows.append({"what": f"{one['what']}, {one['unit']}", **spreads})
    return rows


def _spread(values: Sequence[float]) -> str:
    """Write a median with the least and the most."""
    middle, least, most = map(_number, values)
    return f"{middle} ({least} to {most})"


def _peers_short(data: Any) -> list[Row]:
    """Return one row for each engine of bench_peers, as ratios to tep."""
    rows: dict[str, Row] = {}
    for one in data["rows"]:
        if one["median"] is None:
            continue
        row = rows.setdefault(one["who"], {"who": one["who"]})
        if one["who"] == "tep":
            row[one["what"]] = f"{_number(one['median'])} {one['unit']}"
        elif one["ratio"] is not None:
            row[one["what"]] = _spread(one["ratio"])
    return list(rows.values())


def _engine_short(data: Any) -> list[Row]:
    """Return the costs of two NICs."""
    figures = [one for one in data["figures"] if "2 NICs" in one["what"] and one["aim"] is not None]
    names = ("what", "median", "in method calls", "best", "aim")
    return [{name: row[name] for name in names} for row in _engine({"figures": figures})]


def _published_short(data: Any) -> list[Row]:
    """Return how far off the points of each table of `tep reproduce` are."""
    errors: dict[tuple[str, str, str], list[float]] = {}
    for one in data["points"]:
        key = (one["table"], one["class"], "points" if one["unit"] == "%" else "%")
        errors.setdefault(key, [])
        if one["error"] is not None:
            errors[key].append(abs(one["error"]))
    return [
        {
            "table": table,
            "class": kind,
            "points": sum(
                (one["table"], one["class"], one["unit"] == "%") == (table, kind, unit == "points")
                for one in data["points"]
            ),
            "median error": f"{statistics.median(found):.1f} {unit}" if found else "",
            "largest": f"{max(found):.1f} {unit}" if found else "",
        }
        for (table, kind, unit), found in errors.items()
    ]


def table_rows(data: Any) -> list[Row]:
    """Make the table of a program that prints one row, or rows."""
    rows = data if isinstance(data, list) else data.get("rows", data.get("results", [data]))
    if isinstance(rows, Mapping):
        rows = [{"what": key, **value} for key, value in rows.items()]
    if len(rows) == 1:
        return [{"what": key, "value": _shown(value)} for key, value in rows[0].items()]
    return [{key: _shown(value) for key, value in row.items()} for row in rows]


def _shown(value: object) -> str:
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, list):
        return ", ".join(_shown(one) for one in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _number(value: float) -> str:
    """Write a number with three significant digits, or all in front of the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Bench:
    """One thing to measure.

    Attributes:
        title: title of its section.
        command: words, run at the top of the checkout; "{json}" stands for a file that it writes;
            without it, its output is taken.
        rows: makes a table of its JSON.
        about: remarks for its reader.
        short: makes the table of the first page; None = it is not there.
    """

    title: str
    command: tuple[str, ...]
    rows: Callable[[Any], list[Row]]
    about: str
    short: Callable[[Any], list[Row]] | None = None


_PEERS: Final = (
    "--peer",
    "mooncake-transfer-engine-non-cuda=mooncake-transfer-engine-non-cuda:mooncake.engine",
    "--peer",
    "nixl-cu12=--no-deps nixl-cu12 numpy:nixl_cu12",
)


def _bench(words: str) -> tuple[str, ...]:
    return (*words.split(), "--json")


BENCHES: Final[dict[str, Bench]] = {
    "engine": Bench(
        "The engine's own cost",
        _bench("python -m tests.bench.bench_engine"),
        _engine,
        "CPU time over NICs that take everything at once, both ends of a transfer, page lists "
        "given as plain arrays. What these NICs take themselves is in every figure; the rows of "
        "null NICs alone say how much it is. The same Python takes up to twice as long on another "
        "machine: compare the numbers of method calls, which a loop beside each figure gives.",
        _engine_short,
    ),
    "busy": Bench(
        "Beside a busy program",
        _bench("python -m tests.bench.bench_busy"),
        _busy,
        "Two processes of this host; the load computes in the sender, in the receiver or in both. "
        "Ratios are to the figure alone in the same round. A load in another process takes cores "
        "and never the interpreter. [What it means](../concepts/busy.md).",
    ),
    "verbs-stub": Bench(
        "Over libibverbs",
        _bench("python -m tests.bench.bench_verbs_stub"),
        figure_rows,
        "CPU time of the whole engine to posted chains of work requests; the provider is a stub in "
        "C, and there is no NIC.",
    ),
    "libfabric": Bench(
        "Over libfabric",
        _bench("python -m tests.bench.bench_libfabric"),
        figure_rows,
        "Beside a C loop on the same provider, in turns; the others are stopped meanwhile.",
    ),
    "efa": Bench(
        "Over EFA, on a fake device",
        ("scripts/fake_efa", "python", "-m", "tests.bench.bench_efa", "--json"),
        figure_rows,
        "The device is simulated, so these are costs of the host and say nothing of a NIC. "
        "Its work drives everything else out of the caches: rows cost more than beside a NIC.",
    ),
    "peers": Bench(
        "Beside other engines, between processes of one host",
        _bench("python -m tests.bench.bench_peers"),
        _peers,
        "Wall time from submit until the receiver knows, in turns, each engine in an environment "
        "of its own; least and most are over rounds. The ratio is to tep in the same round, above "
        "1 where the other is better. CPU is of both processes. ucxx sends messages, having no "
        "one-sided writes in Python.",
        _peers_short,
    ),
    "vllm": Bench(
        "Inside vLLM, beside NixlConnector",
        (
            ".integrations/vllm/bin/python",
            "tests/integrations/vllm_pace.py",
            *("--rounds", "15", "--json", "{json}"),
        ),
        _beside,
        "Two pairs of vLLM 0.32 on CPUs, each a prefill and a decode instance with a small random "
        "model: one with tep's connector, one with NixlConnector on NIXL 1.5.1 over UCX, both at "
        "their defaults. They compute the same prompts in turns; medians, least and most of 15 "
        "rounds. A load is from vLLM's order until vLLM knows that all blocks are there, a first "
        "token from the request at the decoder. A ratio above 1 says that tep is better. The "
        "environment is made by `scripts/test --integrations vllm`.",
    ),
    "sim": Bench(
        "The simulator's speed",
        _bench("python -m tests.bench.bench_sim"),
        figure_rows,
        "CPU time, all engines included.",
    ),
    "chaos": Bench(
        "Drawn scenarios a second",
        _bench("python -m tests.bench.bench_chaos --batches 5 --runs 200"),
        table_rows,
        "With the oracle, and with a phase in which everything that was posted has to end.",
    ),
    "bugs": Bench(
        "Planted bugs, and how soon each is found",
        _bench("python -m tests.bench.bench_bugs --starts 3 --most 4000"),
        table_rows,
        "Runs until the tests find a bug that was planted in the engine.",
    ),
    "scale": Bench(
        "Large simulations",
        _bench("python -m tests.bench.bench_scale"),
        _scale,
        "CPU, memory and events of each run in a process of its own. `loop` is one round of a "
        "fixed Python loop, measured just before the run: on a busy machine it grows as CPU does.",
    ),
    "published": Bench(
        "The simulator against published figures",
        _bench("python -m tests.bench.bench_published --out docs/published"),
        _published,
        "`fitted`: numbers of the simulator were fitted to this point. `given`: it is an input. "
        "`predicted`: neither. `counted`: pages and steps, from shapes alone. `not modelled`: "
        "something that matters is missing. `left out`: the error without the point. With "
        "pictures: [the report](../published/report.md). Profiles say more: "
        "tep/sim/profiles/README.md, tep/apps/moe/profiles/README.md.",
        _published_short,
    ),
    "newcomer": Bench(
        "A new user's path",
        _bench("python tests/bench/bench_newcomer.py"),
        table_rows,
        "In a fresh clone, with nothing installed; the packages come from an index nearby.",
    ),
    "install": Bench(
        "Installing and importing",
        ("python", "tests/bench/bench_install.py", "--json", *_PEERS),
        table_rows,
        "Each in a fresh virtual environment, with what it needs but pip and setuptools.",
    ),
}


def measure(name: str) -> None:
    """Run a benchmark and write its file.

    Raises:
        UsageError: it failed; says how.
    """
    bench = BENCHES[name]
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "out.json")
        words = [str(path) if word == "{json}" else word for word in bench.command]
        bin_folder = str(ROOT / ".venv" / "bin")
        env = os.environ | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(  # noqa: S603  # of the table above
            words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
        text = path.read_text() if path.exists() else done.stdout
    text = text.replace(f"{ROOT}/", "")  # paths of this machine are nobody's business
    try:
        data = json.loads(text)
    except ValueError as error:
        tail = (done.stdout + done.stderr)[-2000:]
        raise UsageError(
            f"{name}: {' '.join(words)} ended with {done.returncode}:\n{tail}"
        ) from error
    DATA.mkdir(exist_ok=True)
    document = {
        "command": " ".join(word for word in bench.command if word not in {"--json", "{json}"}),
        "date": datetime.now(UTC).date().isoformat(),
        "tep": __version__,
        "machine": f"{_cpu()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "data": data,
    }
    (DATA / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


_HEAD: Final = """Written by `scripts/benchmarks` from `docs/data`; nothing here is typed by hand.
`scripts/benchmarks NAME` measures anew. Read the ratios first: absolute figures of a shared machine
are not repeated by the next run."""


def pages() -> dict[str, str]:
    """Make the pages from the files of docs/data, by path under docs; the overview comes first."""
    whole = {"benchmarks.md": f"# Benchmarks\n\n{_HEAD}\n"}
    links, missing = ["", "## All tables", ""], []
    for name, bench in BENCHES.items():
        path = DATA / f"{name}.json"
        if not path.exists():
            missing.append(f"`{name}` ({bench.title})")
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        load = " and ".join(map(str, found["load"]))
        run = f"`{found['command']}`, {found['date']}, tep {found['tep']}"
        about = ["", bench.about, "", f"{run}, {found['machine']}, load {load}.", ""]
        if bench.short is not None:
            table = _markdown(bench.short(found["data"]))
            first = [f"## {bench.title}", *about, *table, ""]
            whole["benchmarks.md"] += "\n" + "\n".join(first).replace("](../", "](")
        table = _markdown(bench.rows(found["data"]))
        whole[f"benchmarks/{name}.md"] = "\n".join([f"# {bench.title}", *about, *table]) + "\n"
        links.append(f"- [{bench.title}](benchmarks/{name}.md)")
    if missing:
        links += ["", f"Not measured yet: {', '.join(missing)}."]
    whole["benchmarks.md"] += "\n".join(links) + "\n"
    return whole


def _markdown(rows: Sequence[Row]) -> list[str]:
    """Make a Markdown table, without empty columns."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in names if any(row.get(name) not in {"", None} for row in rows)]
    cells = [[str(row.get(name, "")).replace("|", "/") for name in columns] for row in rows]
    lines = (columns, ["---"] * len(columns), *cells)
    return [f"| {' | '.join(line)} |" for line in lines]


def main(argv: Sequence[str]) -> int:
    """Run the named benchmarks, and write or check the pages."""
    parser = argparse.ArgumentParser(prog="scripts/benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="what to measure anew; all: everything")
    parser.add_argument("--list", action="store_true", help="name each with its command")
    parser.add_argument("--check", action="store_true", help="write nothing; are the pages right?")
    given = parser.parse_args(argv)
    if given.list:
        for name, bench in BENCHES.items():
            sys.stdout.write(f"{name:14} {' '.join(bench.command)}\n")
        return 0
    names = list(BENCHES) if given.names == ["all"] else given.names
    if unknown := sorted(set(names) - set(BENCHES)):
        sys.stderr.write(f"benchmarks: no {', '.join(unknown)}; there are: {', '.join(BENCHES)}\n")
        return 2
    for name in names:
        sys.stderr.write(f"measuring {name}: {' '.join(BENCHES[name].command)}\n")
        try:
            measure(name)
        except UsageError as error:
            sys.stderr.write(f"benchmarks: {error}\n")
            return 1
    written = {DOCS / name: text for name, text in pages().items()}
    stray = set((DOCS / "benchmarks").glob("*.md")) - written.keys()
    if given.check:
        right = all(p.exists() and p.read_text(encoding="utf-8") == t for p, t in written.items())
        return int(bool(stray) or not right)
    for path in stray:
        path.unlink()
    for path, text in written.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
