"""C declarations, word for word as headers have them, turned into ctypes: structs and prototypes.

What tep calls and mirrors is declared once, in C, beside its documentation; tests/abi compares what
comes out with the compiler. Understood is what those headers use: members of plain types, pointers,
arrays, functions by pointer, structs and unions inside, comments.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from ctypes import POINTER, Structure, Union
from types import MappingProxyType
from typing import Any, Final, TypeVar

__all__ = ["Prototype", "calls_of", "mirror", "mirrors", "prototypes"]

Prototype = tuple[Any, tuple[Any, ...]]
"""What a call returns, and what it takes, as ctypes."""

AggregateT = TypeVar("AggregateT", bound=type[Structure] | type[Union])

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
_FUNCTION: Final = re.compile(r"(.+?)\(\*(\w+)\)\s*\((.*)\)", re.DOTALL)
_NESTED: Final = re.compile(r"(struct|union)\s*\{(.*)\}\s*(\w+)", re.DOTALL)
_MEMBER: Final = re.compile(r"(.+?)(\w+)\s*(?:\[(\w+)\])?", re.DOTALL)


def mirror(text: str) -> Callable[[AggregateT], AggregateT]:
    """Give a class the layout of a C struct or union.

    Args:
        text: its declaration. A pointer to a struct that is mirrored already is typed, for
            `.contents`; all others are addresses. A mutex ends the mirror: its size differs between
            machines.
    """
    head, _, rest = _plain(text).partition("{")
    name = " ".join(head.split())
    body = rest.rpartition("}")[0]

    def give(cls: AggregateT) -> AggregateT:
        _MIRRORS[name] = cls
        cls._fields_ = list(_members(body, name.split()[1]))
        return cls

    return give


def mirrors(module: str) -> dict[str, type[Structure]]:
    """The structs that a module mirrors, by the names that C gives them."""
    mine = vars(sys.modules[module]).values()
    return {
        name.removeprefix("struct "): cls
        for name, cls in _MIRRORS.items()
        if issubclass(cls, Structure) and cls in mine and cls.__module__ == module
    }


def calls_of(table: str, *members: str, words: bool = False) -> dict[str, Prototype]:
    """Prototypes of some functions in a mirrored table, by "table.member".

    Args:
        table: the struct.
        members: which.
        words: every argument is declared a pointer, integers too; see tep.backends.ffi.libfabric.
    """
    found = {name: _CALLS[name] for name in (f"{table}.{member}" for member in members)}
    if words:
        return {name: (back, (_POINTER,) * len(taken)) for name, (back, taken) in found.items()}
    return found


def prototypes(text: str) -> dict[str, Prototype]:
    """What functions return and take, by name, from their declarations."""
    found = {}
    for declaration in filter(str.strip, _plain(text).split(";")):
        head, _, arguments = declaration.strip().partition("(")
        match = _MEMBER.fullmatch(head.strip())
        assert match, declaration
        found[match[2]] = _prototype(match[1], arguments.rpartition(")")[0])
    return found


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
    return (
        ctypes.c_char_p if text else _type(back),
        tuple(_type(each) for each in types),
    )


def _type(words: str, *, typed: bool = False) -> Any:
    words = " ".join(word for word in words.replace("*", " * ").split() if word != "const")
    if words.endswith("*"):
        target = _MIRRORS.get(words.removesuffix(" *"))
        return POINTER(target) if typed and target is not None else _POINTER
    if words.startswith("enum "):
        return ctypes.c_int
    return _MIRRORS[words] if words in _MIRRORS else _PLAIN[words]
