"""Public names against the dictionary in ARCHITECTURE.md, and docstrings against riddles."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import tep
from tep.core.handles import Handle
from tests.tidy.sources import nodes, python_files, text

NOT_OURS = {
    "lane": "path",
    "letter": "control message",
    "note": "control message",
    "shun": "mark down",
    "tally": "sums, or counter",
    "mailroom": "channel",
    "outstanding": "in flight",
    "waiting": "queued",
}
"""Words that were used for a thing that has another, and the other."""

OPENINGS = ("What ", "Who ", "Whom ", "Of ", "Where ", "How ", "As ")
"""Words that no docstring starts with; it starts with a verb or "The", or is a noun phrase."""

INVERSIONS = re.compile(r"\b(?:of which|of whom|to whom|that of)\b", re.IGNORECASE)
"""Words that no docstring has: name the thing again."""


def _words(name: str) -> set[str]:
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def _public_names() -> set[str]:
    """Every public name, and every public member of a public class or of a handle."""
    found = set(tep.__all__)
    values = [getattr(tep, name) for name in tep.__all__]
    classes = [value for value in values if inspect.isclass(value)]
    for owner in {*classes, *Handle.__subclasses__()}:
        if issubclass(owner, BaseException):
            continue
        members = {*dir(owner), *getattr(owner, "__annotations__", {})}
        found |= {f"{owner.__name__}.{name}" for name in members if name[0] != "_"}
    return found


def _dictionary() -> list[str]:
    page = text(Path("ARCHITECTURE.md"))
    table = page[page.index("## Words") : page.index("## Rooms")]
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    return [word.strip() for row in rows[2:] for word in re.split(r"[,;:]", row)]


def test_public_names_use_the_words_of_the_dictionary() -> None:
    """A second word for a thing makes a reader look for a second thing."""
    found = {
        f"{name}: say {NOT_OURS[word]}"
        for name in _public_names()
        for word in {word.removesuffix("s") for word in _words(name)} & NOT_OURS.keys()
    }

    assert set() == found


def test_a_word_has_one_entry() -> None:
    """Two meanings of one word are two pages of confusion."""
    words = _dictionary()

    assert len(words) >= 25
    assert sorted(set(words)) == sorted(words)


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every docstring, and of every text that describes an assignment."""
    for node in nodes(path):
        body = getattr(node, "body", None)
        for part in body if isinstance(body, list) else ():
            match part:
                case ast.Expr(value=ast.Constant(value=str(found))):
                    yield part.lineno, found


def test_docstrings_are_no_riddles() -> None:
    """A docstring that starts with "What" or "Of" has to be read twice."""
    found = [
        f"{path}:{line}"
        for path in python_files("tep")
        for line, doc in _docstrings(path)
        if doc.lstrip().startswith(OPENINGS) or INVERSIONS.search(doc)
    ]

    assert [] == found
