"""Foreign libraries: declared in C, found, and their answers checked.

A declaration is C, with the names and the order of the headers, and becomes ctypes: what tep calls
and mirrors stands once, beside its documentation, and tests/abi compares what comes out with the
compiler. Understood is what those headers use: members of plain types, pointers, arrays, functions
by pointer, structs and unions inside, comments.

A library is looked for once, by small steps, each saying why it failed; the answer, good or bad, is
remembered. Nothing here knows what a library is for: a caller gives the steps, and a function that
accepts or refuses what they find.

Every foreign call passes through `check`: no other file of tep turns a return code into an
exception.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import POINTER, Structure, Union
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

from tep.base.errors import BackendUnavailable, FabricError

__all__ = [
    "Found", "Prototype", "Step", "call_of", "check", "env_step", "find", "forget", "give_types",
    "mirror", "path_step", "prototypes", "system_step", "wheel_step",
]  # fmt: skip

Prototype = tuple[Any, tuple[Any, ...]]
"""The result and the arguments of a call, as ctypes."""

_POINTER: Final = ctypes.c_void_p
_PLAIN: Final = MappingProxyType(
    {
        "void": None,
        "char": ctypes.c_char,
        "int": ctypes.c_int,
        "unsigned int": ctypes.c_uint,
        "size_t": ctypes.c_size_t,
        "ssize_t": ctypes.c_ssize_t,
        "uint8_t": ctypes.c_uint8,
        "uint16_t": ctypes.c_uint16,
        "uint32_t": ctypes.c_uint32,
        "uint64_t": ctypes.c_uint64,
        "__be64": ctypes.c_uint64,
        "fi_addr_t": ctypes.c_uint64,
        "fid_t": _POINTER,
    }
)
_LENGTHS: Final = MappingProxyType({"IBV_SYSFS_NAME_MAX": 64, "IBV_SYSFS_PATH_MAX": 256})
_MIRRORS: Final[dict[str, Any]] = {}  # by what C calls them, e.g. "struct ibv_mr"
_CALLS: Final[dict[str, Prototype]] = {}  # of members that are pointers to functions
_AGGREGATE: Final = re.compile(r"^(struct|union) (\w+) \{\n(.*?)^\};", re.DOTALL | re.MULTILINE)
_FUNCTION: Final = re.compile(r"(.+?)\(\*(\w+)\)\s*\((.*)\)", re.DOTALL)
_NESTED: Final = re.compile(r"(struct|union)\s*\{(.*)\}\s*(\w+)", re.DOTALL)
_MEMBER: Final = re.compile(r"(.+?)(\w+)\s*(?:\[(\w+)\])?", re.DOTALL)


def mirror(text: str) -> SimpleNamespace:
    """Give C's structs and unions their layouts as ctypes classes, each by its own name.

    Args:
        text: their declarations. A pointer to a struct that is mirrored already is typed, for
            `.contents`; all others are addresses. A mutex ends a mirror: its size differs between
            machines.
    """
    found = SimpleNamespace()
    for kind, name, body in _AGGREGATE.findall(_plain(text)):
        cls: Any = type(name, (Union if kind == "union" else Structure,), {})
        _MIRRORS[f"{kind} {name}"] = cls  # first, since fi_info points to the next of its kind
        cls._fields_ = list(_members(body, name))
        setattr(found, name, cls)
    return found


def call_of(name: str) -> Prototype:
    """The prototype of a function in a mirrored table, by "table.member"."""
    return _CALLS[name]


def prototypes(text: str) -> dict[str, Prototype]:
    """Prototypes of functions, by name, from their declarations."""
    found = {}
    for declaration in filter(str.strip, _plain(text).split(";")):
        head, _, arguments = declaration.strip().partition("(")
        match = _MEMBER.fullmatch(head.strip())
        assert match, declaration
        found[match[2]] = _prototype(match[1], arguments.rpartition(")")[0])
    return found


def give_types(lib: ctypes.CDLL, known: Mapping[str, Prototype]) -> None:
    """Declare those calls of a library that it has."""
    for name, (result, arguments) in known.items():
        if (call := getattr(lib, name, None)) is not None:
            call.restype, call.argtypes = result, arguments


def _plain(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def _members(body: str, of: str) -> Iterator[tuple[str, Any]]:
    depth, start = 0, 0
    for at, letter in enumerate(body):
        depth += (letter == "{") - (letter == "}")
        if letter == ";" and not depth:
            if "pthread_mutex_t" in body[start:at]:
                return
            yield _member(body[start:at].strip(), of)
            start = at + 1


def _member(declaration: str, of: str) -> tuple[str, Any]:
    if match := _NESTED.fullmatch(declaration):
        kind, body, name = match.groups()
        base = Union if kind == "union" else Structure
        fields = list(_members(body, f"{of}.{name}"))
        return name, type(f"{of}_{name}", (base,), {"_fields_": fields})
    if match := _FUNCTION.fullmatch(declaration):
        _CALLS[f"{of}.{match[2]}"] = _prototype(match[1], match[3])
        return match[2], _POINTER
    match = _MEMBER.fullmatch(declaration)
    assert match, declaration
    kind = _type(match[1], typed=True)
    length = match[3]
    return match[2], kind * int(_LENGTHS.get(length, length)) if length else kind


def _prototype(back: str, arguments: str) -> Prototype:
    text = back.replace("const", "").replace(" ", "") == "char*"
    taken = [each.strip() for each in arguments.split(",")]
    if taken == ["void"]:
        taken = []
    # The name of an argument may be left out where its type ends in an asterisk.
    types = (
        each if each.endswith("*") else each.rstrip("abcdefghijklmnopqrstuvwxyz_0123456789")
        for each in taken
    )
    return (ctypes.c_char_p if text else _type(back), tuple(_type(each) for each in types))


def _type(words: str, *, typed: bool = False) -> Any:
    words = " ".join(word for word in words.replace("*", " * ").split() if word != "const")
    if words.endswith("*"):
        target = _MIRRORS.get(words.removesuffix(" *"))
        return POINTER(target) if typed and target is not None else _POINTER
    if words.startswith("enum "):
        return ctypes.c_int
    return _MIRRORS[words] if words in _MIRRORS else _PLAIN[words]


@dataclass(frozen=True, slots=True)
class Found:
    """A library that was loaded and accepted.

    Attributes:
        library: the handle.
        path: what was given to the loader.
        found_via: name of the step that found it.
        tried: (step, why it failed) of the steps before.
    """

    library: ctypes.CDLL
    path: str
    found_via: str
    tried: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One place to look.

    Attributes:
        name: how reports call it.
        paths: the candidates there; raises LookupError, saying why, where there is none.
        binding: the user named this place: if it fails, no later step is tried.
    """

    name: str
    paths: Callable[[], Iterable[str]]
    binding: bool = False


_REMEMBERED: dict[str, Found | BackendUnavailable] = {}


def find(
    what: str, steps: Sequence[Step], accept: Callable[[ctypes.CDLL], object], cure: str
) -> Found:
    """Load the first library that the steps find and `accept` takes; remember the outcome.

    Args:
        what: the library's name, also the name under which the outcome is remembered.
        steps: where to look, best first.
        accept: looks at a loaded library; raises LookupError or AttributeError with the reason if
            it is not usable.
        cure: what to do when nothing is found, for the message.

    Raises:
        BackendUnavailable: with each step and its reason. The same error every time.
    """
    known = _REMEMBERED.get(what)
    if known is None:
        known = _REMEMBERED[what] = _search(what, steps, accept, cure)
    if isinstance(known, BackendUnavailable):
        raise known
    return known


def forget(what: str) -> None:
    """Look for a library anew at the next find(). For tests."""
    _REMEMBERED.pop(what, None)


def _search(
    what: str, steps: Sequence[Step], accept: Callable[[ctypes.CDLL], object], cure: str
) -> Found | BackendUnavailable:
    tried: list[tuple[str, str]] = []
    for step in steps:
        failed = len(tried)
        try:
            for path in step.paths():
                library = _load(path, step.name, tried)
                if library is None:
                    continue
                try:
                    accept(library)
                    return Found(library, path, step.name, tuple(tried))
                except (LookupError, AttributeError) as error:
                    tried.append((f"{step.name}: {path}", _reason(error)))
        except LookupError as error:
            tried.append((step.name, _reason(error)))
            continue
        if step.binding and len(tried) > failed:
            break
    return BackendUnavailable(f"no usable {what} on this machine; {cure}", tuple(tried))


def _load(path: str, name: str, tried: list[tuple[str, str]]) -> ctypes.CDLL | None:
    try:
        # Local, so that two builds of one library can live in one process; now, so that a missing
        # symbol is a reason here and not a crash later.
        return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        tried.append((f"{name}: {path}", _reason(error)))
        return None


def _reason(error: Exception) -> str:
    return str(error.args[0]) if error.args else type(error).__name__


def env_step(variable: str) -> Step:
    """Look where an environment variable points; what the user names is binding."""

    def paths() -> Iterable[str]:
        value = os.environ.get(variable)
        if not value:
            raise LookupError("not set")
        return (value,)

    return Step(name=variable, paths=paths, binding=True)


def path_step(name: str, candidates: Sequence[str]) -> Step:
    """Look at fixed places."""

    def paths() -> Iterable[str]:
        there = [path for path in candidates if Path(path).exists()]
        if not there:
            raise LookupError(f"no file {' or '.join(candidates)}")
        return there

    return Step(name=name, paths=paths)


def wheel_step(distribution: str, filename: str) -> Step:
    """Look among the files that pip installed for a distribution."""

    def paths() -> Iterable[str]:
        try:
            files = importlib.metadata.files(distribution) or ()
        except importlib.metadata.PackageNotFoundError:
            raise LookupError("not installed") from None
        there = [str(Path(str(f.locate())).resolve()) for f in files if f.name == filename]
        if not there:
            version = importlib.metadata.version(distribution)
            raise LookupError(f"version {version} holds no {filename}")
        return there

    return Step(name=f"wheel {distribution}", paths=paths)


def system_step(soname: str) -> Step:
    """Look where the system's loader looks."""
    return Step(name="system", paths=lambda: (soname,))


def check(
    rc: int, what: str, *, describe: Callable[[int], str] = os.strerror, **context: object
) -> int:
    """Return `rc` if it is 0 or more.

    Args:
        rc: what the call returned; -errno where it failed.
        what: the call, e.g. "fi_enable".
        describe: errno -> text, the library's own.
        **context: values that whoever reads the message will want.

    Raises:
        FabricError: code "PROVIDER"; the message holds call, text, code and context.
    """
    if rc >= 0:
        return rc
    values = "".join(f" {name}={value!r}" for name, value in context.items())
    raise FabricError(f"{what} failed: {describe(-rc)} ({rc}){values}", code="PROVIDER")
