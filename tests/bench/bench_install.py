"""Measure the install and import of tep and of peers: size on disk, packages, seconds of CPU.

    python tests/bench/bench_install.py [--peer "NAME=PIP ARGUMENTS:MODULE"] [--json]

Each is installed into a fresh virtual environment; the contents of a bare one are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMES = 5
OWN = "tep-engine=.:tep; tep.TransferEngine"
IMPORT = """
import resource, sys
before = resource.getrusage(resource.RUSAGE_SELF)
import {module}
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
"""


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(wish: str) -> dict[str, object]:
    """Install, and import in processes of their own."""
    name, _, rest = wish.partition("=")
    arguments, _, module = rest.rpartition(":")
    with tempfile.TemporaryDirectory() as folder:
        env = Path(folder, "env")
        venv.create(env, with_pip=True)
        python = env / "bin" / "python"
        bare = size_of(env)
        subprocess.run(
            [
                python,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--no-compile",
                *arguments.split(),
            ],
            cwd=ROOT,
            check=True,
            stdout=sys.stderr,
        )
        listed = subprocess.run(
            [python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
            check=True,
            capture_output=True,
            text=True,
        )
        packages = [one["name"] for one in json.loads(listed.stdout)]
        added = size_of(env) - bare
        times = []
        for _ in range(TIMES):
            code = IMPORT.format(module=module)
            ran = subprocess.run(
                [python, "-c", code], capture_output=True, text=True, check=False, cwd=folder
            )
            if ran.returncode == 0:
                times.append(float(ran.stdout.splitlines()[-1]))
        version = subprocess.run(
            [python, "-m", "pip", "show", name], capture_output=True, text=True, check=False
        )
        found = [line for line in version.stdout.splitlines() if line.startswith("Version: ")]
    return {
        "what": f"{name} {found[0].removeprefix('Version: ') if found else ''}".strip(),
        "installed, MB": round(added / 1e6, 1),
        "packages": len(set(packages) - {"pip", "setuptools"}),
        f"import {'of the module'}, ms of CPU": round(1e3 * statistics.median(times), 1)
        if times
        else "fails here",
    }


def main(argv: list[str]) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=ARGUMENTS:MODULE")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    os.environ["PIP_CONSTRAINT"] = ""
    was_there = (ROOT / "build").exists()
    rows = [measure(wish) for wish in (OWN, *given.peer)]
    if not was_there:  # setuptools builds in the tree, and would pack what lies there next time
        shutil.rmtree(ROOT / "build", ignore_errors=True)
    sys.stdout.write(json.dumps({"rows": rows}, indent=1) + "\n" if given.json else f"{rows}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
