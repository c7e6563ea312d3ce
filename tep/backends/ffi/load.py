"""Foreign libraries: declared in C, found, and their answers checked.

A declaration is C, with the names and the order of the headers, and becomes ctypes: what tep calls
and mirrors stands once, beside its documentation, and tests/abi compares what comes out with the
compiler. Understood is what those headers use: members of plain types, pointers, arrays, functions
by pointer, structs and unions inside, comments.

A library is looked for place by place, and the error says why each of them failed. Nothing here
knows what a library is for: a caller gives the places, and a function that accepts or refuses what
is found there.

Every foreign call passes through `check`: no other file of tep turns a return code into an
exception.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import POINTER, Structure, Union
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, NamedTuple

from tep.base.errors import BackendUnavailable, FabricError

__all__ = [
    "Found", "Prototype", "call_of", "check", "find", "give_types", "lacks", "mirror",
    "prototypes", "wheel_files",
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
            `.contents`; all others are addresses.
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


class Found(NamedTuple):
    """A library that was loaded and accepted.

    Attributes:
        path, found_via: what was given to the loader, and the name of the place.
        tried: (place, why it failed) of the places before.
    """

    library: ctypes.CDLL
    path: str
    found_via: str
    tried: tuple[tuple[str, str], ...]


def find(
    what: str,
    named: tuple[str, str | None],
    places: Mapping[str, Sequence[str]],
    accept: Callable[[ctypes.CDLL], object],
    cure: str,
) -> Found:
    """Load the first library that is found and that `accept` takes.

    Args:
        what: the library, for the message.
        named: where the user may name a path, and the path: if there is one, nothing else is tried.
        places: names for the loader by place, best first; none: nothing is installed there.
        accept: raises LookupError with the reason if a loaded library is not usable.
        cure: what to do when nothing is found, for the message of BackendUnavailable.
    """
    variable, path = named
    tried = [] if path else [(variable, "not set")]
    for place, paths in {variable: [path]}.items() if path else places.items():
        if not paths:
            tried.append((place, "not installed"))
        for each in paths:
            try:
                # Local, so that two builds of one library can live in one process; now, so that a
                # missing symbol is a reason here and not a crash later; errno is kept for no other.
                library = ctypes.CDLL(each, os.RTLD_NOW | os.RTLD_LOCAL, use_errno=True)
                accept(library)
                return Found(library, each, place, tuple(tried))
            except (OSError, LookupError) as error:
                tried.append((f"{place}: {each}", str(error.args[0])))
    raise BackendUnavailable(f"no usable {what} on this machine; {cure}", tuple(tried))


def lacks(lib: ctypes.CDLL, names: Iterable[str]) -> None:
    """Raise LookupError with the calls that a library does not have."""
    if missing := [name for name in names if not hasattr(lib, name)]:
        raise LookupError(f"it has no {', '.join(missing)}")


def wheel_files(distribution: str, filename: str) -> list[str]:
    """The paths of a file among those that pip installed for a distribution."""
    from importlib import metadata  # takes longer to import than this module

    try:
        files = metadata.files(distribution) or ()
    except metadata.PackageNotFoundError:
        return []
    return [str(Path(str(f.locate())).resolve()) for f in files if f.name == filename]


def check(
    rc: int, what: str, *, describe: Callable[[int], str] = os.strerror, **context: object
) -> int:
    """Return `rc` if it is 0 or more.

    Args:
        rc: what the call returned; -errno where it failed.
        what: the call, e.g. "fi_enable".
        describe: errno -> text, the library's own.
        **context: values for the message of the FabricError, whose code is "PROVIDER".
    """
    if rc >= 0:
        return rc
    values = "".join(f" {name}={value!r}" for name, value in context.items())
    raise FabricError(f"{what} failed: {describe(-rc)} ({rc}){values}", code="PROVIDER")
