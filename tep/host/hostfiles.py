"""The files that describe a machine: this one, or the machine in a bundle of the doctor.

Topology and doctor read sysfs, procfs and the environment only through this module, so that they
work for a captured machine too. No rule lives here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from tep.base.api import CudaDevice
from tep.base.errors import TepError, UsageError

__all__ = ["Capture", "CudaDevice", "HostFiles", "LiveFiles", "Recorder", "open_files"]

_T = TypeVar("_T")
_TEXT_MAX: Final = 1 << 20  # longer than any file that is read


class HostFiles(Protocol):
    """The reads that a machine answers; None or empty for anything that is not there."""

    def read(self, path: str) -> str | None:
        """Return the text of a file without its last newline."""

    def read_bytes(self, path: str) -> bytes | None:
        """Return the bytes of a binary file."""

    def names(self, folder: str) -> list[str]:
        """List the names in a folder, sorted."""

    def real(self, path: str) -> str:
        """Return a path with all links followed, or "" if it leads nowhere."""

    def environ(self, name: str) -> str | None:
        """Return a variable of the environment."""

    def cuda(self) -> list[CudaDevice] | None:
        """List the GPUs that the CUDA driver shows; None: it cannot be asked."""


class LiveFiles:
    """The files of this machine.

    SYSFS_PATH replaces /sys where RDMA devices are listed, as for rdma-core.
    """

    @staticmethod
    def _at(path: str) -> Path:
        if path.startswith("/sys/class/infiniband"):
            return Path(os.environ.get("SYSFS_PATH", "/sys"), path.removeprefix("/sys/"))
        return Path(path)

    def read(self, path: str) -> str | None:
        found = self.read_bytes(path)
        return None if found is None else found.decode("utf-8", "replace").rstrip("\n")

    def read_bytes(self, path: str) -> bytes | None:
        try:
            with self._at(path).open("rb") as file:
                return file.read(_TEXT_MAX)
        except OSError:  # not there, not allowed, or a driver that does not answer
            return None

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self._at(folder)))  # noqa: PTH208  # names are wanted
        except OSError:
            return []

    def real(self, path: str) -> str:
        where = self._at(path)
        return os.path.realpath(where) if where.exists() else ""

    def environ(self, name: str) -> str | None:
        return os.environ.get(name)

    def cuda(self) -> list[CudaDevice] | None:
        from tep.host.cuda import list_devices

        try:
            return list_devices()
        except TepError:  # no driver is here, or it does not answer
            return None


class Capture(msgspec.Struct, tag_field="format", tag="tep-machine-1"):
    """Answers that were captured on some machine; anything not asked there counts as missing.

    Attributes:
        texts, binaries: contents of files; a binary one as its length, and its bytes in hex without
            the zeros at the end.
        links, folders, variables: answers of `real`, `names` and `environ`.
        devices: answer of `cuda`.
    """

    texts: dict[str, str]
    links: dict[str, str]
    folders: dict[str, list[str]]
    variables: dict[str, str]
    devices: list[CudaDevice] | None = msgspec.field(name="cuda", default=None)
    binaries: dict[str, tuple[int, str]] = {}

    def read(self, path: str) -> str | None:
        return self.texts.get(path)

    def read_bytes(self, path: str) -> bytes | None:
        size, text = self.binaries.get(path, (-1, ""))
        return None if size < 0 else bytes.fromhex(text).ljust(min(size, _TEXT_MAX), b"\0")

    def names(self, folder: str) -> list[str]:
        return list(self.folders.get(folder, ()))

    def real(self, path: str) -> str:
        return self.links.get(path, "")

    def environ(self, name: str) -> str | None:
        return self.variables.get(name)

    def cuda(self) -> list[CudaDevice] | None:
        return self.devices

    def to_json(self) -> Any:
        """Return the capture as data that `load` reads."""
        return msgspec.to_builtins(self)

    @classmethod
    def load(cls, path: str | Path) -> Capture:
        """Read the machine in a bundle, which `tep doctor --bundle` wrote.

        Raises:
            UsageError: the file cannot be read, or is something else.
        """
        try:
            found = msgspec.json.decode(Path(path).read_bytes(), type=_Bundle).machine
            for name in found.binaries:
                found.read_bytes(name)  # raises if they are none
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise UsageError(
                f"{path}: cannot be read as a captured machine: {type(error).__name__}: {error}"
            ) from error
        return found


class _Bundle(msgspec.Struct):
    machine: Capture


class Recorder:
    """Passes reads on to a machine and keeps every answer, as a Capture."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files
        self.capture = Capture({}, {}, {}, {})

    @staticmethod
    def _keep(answers: dict[str, _T], name: str, found: _T | None) -> _T | None:
        if found is not None:
            answers[name] = found
        return found

    def read(self, path: str) -> str | None:
        return self._keep(self.capture.texts, path, self._files.read(path))

    def read_bytes(self, path: str) -> bytes | None:
        found = self._files.read_bytes(path)
        if found is not None:
            self.capture.binaries[path] = len(found), found.rstrip(b"\0").hex()
        return found

    def names(self, folder: str) -> list[str]:
        return self._keep(self.capture.folders, folder, self._files.names(folder) or None) or []

    def real(self, path: str) -> str:
        return self._keep(self.capture.links, path, self._files.real(path) or None) or ""

    def environ(self, name: str) -> str | None:
        return self._keep(self.capture.variables, name, self._files.environ(name))

    def cuda(self) -> list[CudaDevice] | None:
        self.capture.devices = self._files.cuda()
        return self.capture.devices


def open_files(bundle: Path | None = None) -> HostFiles:
    """Open the files of this machine (None), or of the machine in a bundle."""
    return LiveFiles() if bundle is None else Capture.load(bundle)
