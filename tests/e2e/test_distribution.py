"""The wheel and the source distribution, tried in an environment without the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import tep
from tep.base.distribution import DISTRIBUTION
from tests.tidy.sources import ROOT, files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEM = f"{DISTRIBUTION.replace('-', '_')}-{tep.__version__}"
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""
SHIPPED = {str(path) for path in files() if path.parts[0] == "tep"}


def build(what: str, root: Path, out: Path) -> Path:
    """Call the project's build backend in a folder; nothing is downloaded."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, out],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-3000:]
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, source distribution), made from copies of the tracked files."""
    top = tmp_path_factory.mktemp("built")
    for path in files():
        copy = top / "tree" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / path).read_bytes())
    out = top / "out"
    out.mkdir()
    return build("build_wheel", top / "tree", out), build("build_sdist", top / "tree", out)


def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: tuple[Path, Path]) -> None:
    """A profile or a C source that is left out is missed by the first user, not by a test here."""
    wheel, _ = built

    assert f"{STEM}-py3-none-any.whl" == wheel.name
    assert SHIPPED == members(wheel)
    assert [] == [name for name in members(wheel) if name.endswith((".c", ".h"))]
    assert wheel.stat().st_size < 1_400_000


def test_the_source_distribution_makes_the_same_wheel(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """Packagers of other systems start from it."""
    wheel, source = built
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build("build_wheel", tmp_path / STEM, tmp_path)

    assert f"{STEM}.tar.gz" == source.name
    assert members(wheel) == members(again)
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        assert (tmp_path / STEM / name).is_file()


TRY = """
import numpy as np, tep
with tep.sim.Cluster(nodes=2, profile="efa_2x200", seed=7) as cluster:
    a, b = cluster.engines
    src, dst = np.arange(4096, dtype=np.uint8), np.zeros(4096, np.uint8)
    mr, _ = a.reg_mr(src)
    _, desc = b.reg_mr(dst)
    got = b.expect_imm_count(1, 1)
    a.submit_single_write(4096, (mr, 0), (desc, 0), imm=1).wait()
    got.wait()
    assert (src == dst).all()
print(tep.__file__)
"""


PYTHONS = (*(pytest.param(f"3.{n}", marks=pytest.mark.long) for n in (12, 13)), "3.14")
"""Versions beside that of this test that tep says it runs on."""


def find_python(version: str) -> Path | None:
    """An interpreter of that version, of the system or of pyenv."""
    for found in (shutil.which(f"python{version}"), *Path.home().glob(
        f".pyenv/versions/{version}.*/bin/python{version}"
    )):  # fmt: skip
        asked = [found or "false", "-c", "import sys, venv; print(sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        if done.stdout.strip() == f"({version.replace('.', ', ')})":
            return Path(str(found))
    return None


def pip(env: Path, *words: object) -> None:
    """Install into an environment; the test is skipped where no package index is reachable."""
    command = [sys.executable, "-m", "pip", "--python", env / "bin/python", "--no-input"]
    command += ["--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    done = subprocess.run(
        [*command, "-c", ROOT / "constraints.txt", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip(f"no package index is reachable: {done.stderr.splitlines()[-1]}")
    assert 0 == done.returncode, done.stderr[-3000:]


def borrow(env: Path) -> None:
    """Make an environment that has this Python's packages, but not its tep."""
    venv.create(env, with_pip=False)
    (there,) = env.glob("lib/python*/site-packages")
    (there / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")


def run(bare: Path, *command: str, check: bool = True) -> str:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(bare), "TEP_LIBFABRIC": "/nowhere.so"}
    done = subprocess.run(
        command, cwd=bare, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert 0 == done.returncode or not check, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def bare(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "env", with_pip=False)
    pip(folder / "env", built[0])
    return folder


def test_a_bare_environment_simulates_and_says_what_is_missing(bare: Path) -> None:
    """Whatever only developers have installed must not be needed by the rest."""
    python, command = str(bare / "env/bin/python"), str(bare / "env/bin/tep")
    where = run(bare, python, "-c", TRY)
    states = {
        one["backend"]: one for one in json.loads(run(bare, command, "info", "--json"))["backends"]
    }

    assert str(bare / "env") in where
    assert f"tep {tep.__version__}" == run(bare, command, "--version").strip()
    assert states["local"]["available"]
    assert f"pip install '{DISTRIBUTION}[libfabric]'" in states["libfabric"]["cure"]
    protocol = f"{ROOT}/tests/example/puller.py:pull"
    said = run(bare, command, "sim", "--protocol", protocol, "--faults", "order", "--json")
    assert '"violation": null' in said
    run(bare, command, "moe", "--check", "1", "--json")


def test_a_program_beside_a_clone_imports_the_clone(tmp_path: Path) -> None:
    """A folder called tep beside the program is a namespace package that has no `sim`."""
    clone, env = tmp_path / "tep", tmp_path / "env"
    for path in files():
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        (clone / path).write_bytes((ROOT / path).read_bytes())
    borrow(env)
    pip(env, "--no-deps", "--no-build-isolation", "-e", clone)
    (tmp_path / "program.py").write_text(TRY, encoding="utf-8")

    assert str(clone / "tep") in run(tmp_path, str(env / "bin/python"), "program.py")


def test_a_git_url_with_an_extra_installs(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Whoever tries a branch, or depends on tep before a release, installs it so."""
    clone, env = built[0].parents[1] / "tree", tmp_path / "env"
    git = ["git", "-c", "user.name=tester", "-c", "user.email=tester@localhost"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "a commit"]):
        subprocess.run([*git, *words], cwd=clone, check=True, capture_output=True, timeout=60)
    borrow(env)
    pip(env, "--no-build-isolation", f"git+file://{clone}#egg={DISTRIBUTION}[metrics]")

    assert str(env) in run(tmp_path, str(env / "bin/python"), "-c", TRY)


@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_runs_on_other_pythons(
    built: tuple[Path, Path], tmp_path: Path, version: str
) -> None:
    """What runs on one Python only is noticed by users of the others."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    env = tmp_path / "env"
    subprocess.run(
        [python, "-m", "venv", "--without-pip", env], check=True, capture_output=True, timeout=60
    )
    pip(env, built[0])

    assert str(env) in run(tmp_path, str(env / "bin/python"), "-c", TRY)
    said = json.loads(run(tmp_path, str(env / "bin/tep"), "info", "--json"))
    assert said["python"].startswith(version)


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("from tep.testing import scenarios", "testing"),
        ("from tep.apps.rl.compute import numpy_dtype; numpy_dtype('bf16')", "rl"),
        ("from tep.base.distribution import need; need('matplotlib', 'plot', 'a picture')", "plot"),
        ("from tep.host.cuda import driver; driver()", "cuda"),
        ("import tep; tep.TransferEngine.open('libfabric')", "libfabric"),
    ],
)
def test_what_an_extra_brings_is_missed_with_its_name(bare: Path, code: str, extra: str) -> None:
    """That a module of another name is missing tells nobody what to install."""
    said = run(bare, str(bare / "env/bin/python"), "-c", code, check=False)

    assert "BackendUnavailable" in said
    assert f"pip install '{DISTRIBUTION}[{extra}]'" in said


def test_completion_knows_the_commands() -> None:
    """A command line of ten commands and a hundred options is not learnt by heart."""
    asked = {"_TEP_COMPLETE": "complete_bash", "COMP_WORDS": "tep si", "COMP_CWORD": "1"}
    done = subprocess.run(
        [Path(sys.executable).with_name("tep")],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ["sim"] == done.stdout.split()
