"""A machine with fake GPUs: build tests/cuda_fake, start programs on it, and ask what they called.

`scripts/fake_cuda COMMAND` is this module's command line. The real cuda-python runs on the fake
driver: LD_LIBRARY_PATH puts its libcuda.so.1 before the system's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["BINDINGS", "Call", "Fake", "NoCompiler", "build", "environment", "main"]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "cuda_fake"
BINDINGS = {13: None, 12: Path(sys.prefix) / "cuda12"}
"""The releases of cuda-python that scripts/setup installs: in .venv itself, and in a folder."""
_FLAGS = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
_LIBRARIES = {
    "libcuda.so.1": ("driver.c", "memory.c", "streams.c"),
    "libnvrtc.so.12": ("nvrtc.c",),
    "libnvrtc.so.13": ("nvrtc.c",),
}


class NoCompiler(LookupError):
    """This machine cannot build the fake driver; the message says what is missing."""


def build() -> Path:
    """The folder with the built libraries, made if the sources changed."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NoCompiler("no C compiler (Debian: apt install gcc libc6-dev)")
    digest = hashlib.sha256(repr((_FLAGS, _LIBRARIES)).encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    cache = ROOT / ".cuda_fake"
    done = cache / digest.hexdigest()[:16]
    if done.is_dir():
        return done
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as made:
        for name, sources in _LIBRARIES.items():
            command = [compiler, *_FLAGS, f"-Wl,-soname,{name}", "-o", Path(made, name), *sources]
            subprocess.run([*command, "-lpthread"], cwd=SOURCE, check=True)
        with contextlib.suppress(OSError):  # another process was first
            Path(made).rename(done)
            Path(made).mkdir()
    return done


def environment(settings: Mapping[str, int] | None = None, major: int = 13) -> dict[str, str]:
    """Return the variables that make a program see the GPUs by one cuda-python, with os.environ.

    Args:
        settings: settings of tests/cuda_fake/driver.c.
        major: major version of cuda-python, 12 or 13.
    """
    found = {
        "TEP_FAKE_CUDA": " ".join(f"{name}={value}" for name, value in (settings or {}).items()),
        "LD_LIBRARY_PATH": _before(build(), "LD_LIBRARY_PATH"),
    }
    bindings = BINDINGS[major]
    return found if bindings is None else found | {"PYTHONPATH": _before(bindings, "PYTHONPATH")}


def _before(path: Path, name: str) -> str:
    return os.pathsep.join(filter(None, [str(path), os.environ.get(name)]))


class Call(NamedTuple):
    """A call of the driver: its name, its arguments as text, and the current context's GPU."""

    name: str
    args: tuple[str, ...]
    device: int | None


class Fake:
    """The fake driver of this process, as a test steers it and looks into it."""

    def __init__(self) -> None:
        lib = self._lib = ctypes.CDLL("libcuda.so.1")
        lib.fake_cuda_calls.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        lib.fake_cuda_calls.restype = ctypes.c_size_t
        lib.fake_cuda_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
        lib.fake_cuda_peek.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
        lib.fake_cuda_has.argtypes = [ctypes.c_char_p]
        lib.fake_cuda_reset()

    def set(self, **settings: int) -> None:
        """Change settings of tests/cuda_fake/driver.c, until the next Fake is made."""
        for name, value in settings.items():
            assert self._lib.fake_cuda_set(name.encode(), value) == 0, name

    def has(self, call: str) -> bool:
        """Return True if this driver has a call."""
        return bool(self._lib.fake_cuda_has(call.encode()))

    def calls(self, *names: str) -> list[Call]:
        """The calls since this Fake was made, in their order; those with some names only."""
        size = self._lib.fake_cuda_calls(None, 0)
        raw = ctypes.create_string_buffer(size + 1)
        self._lib.fake_cuda_calls(raw, size)
        found = []
        for line in raw.value.decode().splitlines():
            name, *args, device = line.split()
            if not names or name in names:
                where = None if device == "@-" else int(device[1:])
                found.append(Call(name, tuple(args), where))
        return found

    def peek(self, ptr: int, nbytes: int) -> bytes:
        """Return the present bytes of memory, without pending copies."""
        out = ctypes.create_string_buffer(nbytes)
        assert self._lib.fake_cuda_peek(ptr, out, nbytes), hex(ptr)
        return out.raw

    def word(self, ptr: int) -> int:
        """A 64-bit word at this moment."""
        return int.from_bytes(self.peek(ptr, 8), sys.byteorder)

    def wait_word(self, ptr: int, value: int) -> None:
        """Look at a word until it has a value, as a kernel does."""
        until = time.monotonic() + 20
        while self.word(ptr) != value:
            assert time.monotonic() < until, (self.word(ptr), value)

    def ranges(self) -> int:
        """Count the allocations, mappings and registrations that the driver knows."""
        return int(self._lib.fake_cuda_ranges())


def main(argv: Sequence[str]) -> int:
    """Parse, build, run; the exit status is the command's, or 2 where nothing can be built."""
    parser = argparse.ArgumentParser(
        prog="scripts/fake_cuda",
        description="Run a command on a machine with fake GPUs, under the real cuda-python. "
        "Settings: tests/cuda_fake/driver.c.",
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--cuda-python", type=int, choices=sorted(BINDINGS), default=13)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    given = parser.parse_args(argv)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("no command")
    try:
        settings = {name: int(value, 0) for name, value in (pair.split("=") for pair in given.set)}
        env = os.environ | environment(settings, given.cuda_python)
    except (NoCompiler, ValueError) as error:
        sys.stderr.write(f"fake_cuda: {error}\n")
        return 2
    return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
