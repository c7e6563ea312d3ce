"""Modules whose imports go round in a circle: none of them can be read, or tested, before another.

Imports for a type checker count as well: who reads a module has to know what its types are.
"""

from __future__ import annotations

import ast
from pathlib import Path

import tep
from tep import sim, testing
from tep.apps import kvcache, rl
from tests.tidy.sources import nodes, python_files

ABOVE = ("tep.apps", "tep.integrations")
"""The packages above the engine, which use public names only."""


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _imports() -> dict[str, set[str]]:
    """For each module of tep, the modules of tep that it imports."""
    modules = {_module(path): path for path in python_files("tep")}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        found[name] = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None, f"{path}:{node.lineno} is a relative import"
                for alias in node.names:
                    below = f"{node.module}.{alias.name}"
                    found[name].add(below if below in modules else node.module)
    # The face of a package names its rooms for type checkers, and loads each at its first use.
    faces = {name for name, path in modules.items() if path.name == "__init__.py"}
    return {
        name: {to for to in known if to in modules and to != name and to not in faces & {"tep"}}
        for name, known in found.items()
    }


def _circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected parts of a graph that have two members or more."""
    reach = {name: set(known) for name, known in graph.items()}
    for middle in graph:
        for known in reach.values():
            if middle in known:
                known.update(reach[middle])
    parts = {
        frozenset(other for other in known | {name} if name in reach[other] or other == name)
        for name, known in reach.items()
    }
    return [set(part) for part in parts if len(part) > 1]


def test_a_circle_is_found() -> None:
    """The rule below would hold for any code if the search found nothing."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"d"}}

    assert [{"a", "b", "c"}] == _circles(graph)


def test_no_imports_go_round_in_a_circle() -> None:
    """Packages that are free of circles stay free of them."""
    found = set()
    for circle in _circles(_imports()):
        parts = [name.split(".") for name in circle]
        same = 0
        while len({tuple(part[: same + 1]) for part in parts}) == 1:
            same += 1
        found.add(".".join(parts[0][:same]))

    assert set() == found


def test_what_stands_on_the_engine_uses_public_names() -> None:
    """A user's system can only be built like ours if ours needs nothing private."""
    public = {
        "tep": set(tep.__all__),
        "tep.sim": set(sim.__all__),
        "tep.testing": set(testing.__all__),
        "tep.apps.kvcache": set(kvcache.__all__),
        "tep.apps.rl": set(rl.__all__),
        "tep.compat": {"nixl"},
    }
    own = ("tep.rendezvous", "tep.compat.engines", "tep.base.units", "tep.observe.shown")
    own += ("tep.base.distribution",)  # the name in messages
    found = []
    for path in python_files("tep"):
        top = next((top for top in ABOVE if _module(path).startswith(top)), None)
        if top is None:
            continue
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module and node.module[:3] == "tep":
                if node.module.startswith((top, *own)):
                    continue
                names = {alias.name for alias in node.names} - public.get(node.module, set())
                found += [f"{path}:{node.lineno} {node.module}.{name}" for name in sorted(names)]

    assert [] == found
