"""The adapters for vLLM, verl and NeMo-RL, held to the recorded interfaces of these."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tep.integrations import weights
from tests.abi import make_weights_api

RECORD = json.loads(
    Path(make_weights_api.__file__).with_name("weights_api.json").read_text("utf-8")
)
ROOM = Path(weights.__file__).parent
OURS = [  # package, room, our class, theirs, what is ours alone
    ("vllm", "vllm_engine", "TepWeightTransferEngine", "WeightTransferEngine", set()),
    (
        "vllm",
        "vllm_engine",
        "TepTrainerWeightTransferEngine",
        "TrainerWeightTransferEngine",
        {"push_weights", "commit_weights"},
    ),
    ("vllm", "vllm_engine", "ShardedSource", "WeightSource", set()),
]


def methods(room: str, name: str) -> dict[str, list[str]]:
    """The public methods of a class, and the names of their parameters."""
    tree = ast.parse((ROOM / f"{room}.py").read_text("utf-8"))
    (node,) = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
    found = {}
    for one in node.body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and not one.name.startswith("_"):
            names = [arg.arg for arg in (*one.args.args, *one.args.kwonlyargs)]
            found[one.name] = names[1:] if names[:1] == ["cls"] else names
    return found


@pytest.mark.parametrize(("package", "room", "ours", "theirs", "own"), OURS)
def test_methods_are_those_that_are_called(package, room, ours, theirs, own):
    """Arguments go by name; a method that the other side does not know is never called."""
    expected = RECORD[package]["classes"][theirs]
    found = methods(room, ours)

    assert own <= found.keys()
    for name in found.keys() - own:
        if expected[name][-1:] != ["**kwargs"]:
            assert expected[name] == found[name], name
    assert set(RECORD[package]["abstract"][theirs]) - {"__iter__"} <= found.keys()


def test_what_vllm_is_asked_for_is_there():
    """An import that fails is a worker that does not start."""
    vllm = RECORD["vllm"]
    assert ["name", "module_path_or_cls", "class_name"] == (
        vllm["classes"]["WeightTransferEngineFactory"]["register_engine"]
    )
    assert ["model"] == vllm["functions"]["initialize_layerwise_reload"]
    assert "finalize_layerwise_reload" in vllm["functions"]
    assert ["rank"] == vllm["fields"]["TrainerInitInfo"]
    init = vllm["classes"]["TrainerWeightTransferEngine"]["__init__"]
    assert ["self", "client", "source", "is_sender"] == init
