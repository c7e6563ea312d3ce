"""A look-alike of the module `ray`, held to its recorded interface: tasks run in this process.

`script` says how the next tasks end: None: they run; an exception: it is what `get` raises.
"""

from __future__ import annotations

import json
import pickle
from collections import deque
from itertools import count
from pathlib import Path
from types import SimpleNamespace

RECORD = json.loads((Path(__file__).parents[1] / "abi" / "ray_api.json").read_text("utf-8"))


def make_errors() -> SimpleNamespace:
    """Ray's exceptions, with the parents that they have."""
    made: dict[str, type] = {"Exception": Exception}

    def make(name: str) -> type:
        if name not in made:
            parents = RECORD["errors"][name]
            assert "cause" in RECORD["a task's error"]
            members = {"cause": None} if name == "RayTaskError" else {}
            made[name] = type(name, (make(parents[0]),), members)
        return made[name]

    return SimpleNamespace(**{name: make(name) for name in RECORD["errors"]})


class Task:
    def __init__(self, ray, function) -> None:
        self._ray, self._function = ray, function

    def options(self, **options):
        assert set(options) <= set(RECORD["task options"]), options
        return self

    def remote(self, *arguments):
        ref = f"ref {next(self._ray.numbers)}"
        self._ray.refs[ref] = (self._function, arguments)
        return ref


class Rank:
    """A class of actors, and an actor: its methods are tasks."""

    def __init__(self, ray, kind) -> None:
        self._ray, self._kind = ray, kind

    def options(self, **options):
        assert set(options) <= set(RECORD["actor options"]), options
        return self

    def remote(self):
        actor = Rank(self._ray, self._kind)
        actor._self = self._kind()
        return actor

    def __getattr__(self, name):
        return Task(self._ray, getattr(self._self, name))


class FakeRay:
    """The module that `need("ray", ...)` returns."""

    def __init__(self, *script) -> None:
        self.script, self.refs, self.objects, self.numbers = deque(script), {}, {}, count()
        self.killed: list[Rank] = []
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self.exceptions, self.joined, self.asked = make_errors(), False, {}
        ours = {name for name in vars(FakeRay) if not name.startswith("_")}
        assert ours == set(RECORD["calls"]), ours

    def init(self, address, **options):
        assert {"address", *options} <= set(RECORD["calls"]["init"]), options
        if address == "nowhere:1":
            raise ConnectionError("nobody is there")
        self.asked, self.joined = {"address": address, **options}, True

    def is_initialized(self):
        return self.joined

    def shutdown(self):
        self.joined = False

    def cluster_resources(self):
        return {"CPU": 2.0, "memory": 1e9}

    def remote(self, function):
        return Rank(self, function) if isinstance(function, type) else Task(self, function)

    def kill(self, actor):
        self.killed.append(actor)

    def put(self, value):
        self.objects[key := f"object {len(self.objects)}"] = pickle.dumps(value)
        return key

    def wait(self, ray_waitables, *, num_returns=1, timeout=None):
        assert {"ray_waitables", "num_returns", "timeout"} <= set(RECORD["calls"]["wait"])
        return ray_waitables[:num_returns], ray_waitables[num_returns:]

    def get(self, object_refs):
        function, arguments = self.refs.pop(object_refs)
        end = self.script.popleft() if self.script else None
        if isinstance(end, Exception):
            raise end
        return function(*map(self._value, arguments))

    def _value(self, argument):
        kept = isinstance(argument, str) and argument in self.objects
        return pickle.loads(self.objects[argument]) if kept else argument  # noqa: S301  # our own

    def cancel(self, ray_waitable, *, force):
        assert {"ray_waitable", "force"} <= set(RECORD["calls"]["cancel"])
        del self.refs[ray_waitable]
