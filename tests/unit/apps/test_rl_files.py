"""Checkpoints: safetensors files, one or several with an index."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import tep
from tep.apps.rl.compute import numpy_dtype
from tep.apps.rl.metadata import Tensor, whole
from tep.apps.rl.models import model_from_config
from tep.apps.rl.weights import Checkpoint
from tests.support.safetensors import write_safetensors
from tests.unit.apps.test_rl_parts import SMALL


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x10\0\0\0\0\0\0\0{",
        b"\x02\0\0\0\0\0\0\0[]"[:9],
        b"\x09\0\0\0\0\0\0\0not json!",
        b'\x40\0\0\0\0\0\0\0{"a":{"dtype":"BF16","shape":[9],"data_offsets":[0,18]}}       ',
        b'\x40\0\0\0\0\0\0\0{"a":{"dtype":"XX","shape":[1],"data_offsets":[0,2]}}          ',
    ],
)
def test_files_that_are_no_checkpoint_are_refused(data, tmp_path):
    """A truncated download must not become weights."""
    (tmp_path / "x").write_bytes(data)

    with pytest.raises(tep.UsageError, match="x: no safetensors file"):
        Checkpoint(tmp_path / "x")


def _small_file(path, change=()):
    model = model_from_config(SMALL, name="small", source="test")
    tensors = [(t, np.ones(t.shape, numpy_dtype(t.dtype))) for t in model.tensors]
    write_safetensors(path, [*tensors, *change])
    return model, Checkpoint(path)


def test_a_tensor_that_the_description_does_not_know_is_refused(tmp_path):
    """It would keep the values of the first version for ever, and nobody would be told."""
    model, checkpoint = _small_file(tmp_path / "a")
    checkpoint.check(model)
    extra = Tensor("model.layers.0.mlp.router.bias", (2,), "bf16", 0)

    model, checkpoint = _small_file(tmp_path / "b", [(extra, np.ones(2, numpy_dtype("bf16")))])

    with pytest.raises(tep.UsageError, match="would not be updated: model.layers.0.mlp.router"):
        checkpoint.check(model)


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3), "bf16"), ((4, 2), "bf16"), ((3, 2), "fp32")])
def test_a_tensor_of_another_form_is_refused_by_name(shape, dtype, tmp_path):
    """The rows of a larger one would be taken for those of the model, and be served."""
    write_safetensors(
        tmp_path / "x", [(Tensor("t", shape, dtype, 0), np.ones(shape, numpy_dtype(dtype)))]
    )
    wanted = Tensor("t", (3, 2), "bf16", 0)
    with pytest.raises(tep.UsageError, match=r"t is .*, the model wants bf16\[3, 2\]"):
        Checkpoint(tmp_path / "x").read(wanted, whole((3, 2)))


def test_a_file_of_the_package_is_read(tmp_path):
    """The tests' own writer would hide a name or an order that no other writer has."""
    values = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.ones(2, np.float16)}
    save_file(values, tmp_path / "b")
    checkpoint = Checkpoint(tmp_path / "b")

    for tensor in (Tensor("x", (2, 3), "fp32", 0), Tensor("y", (2,), "fp16", 0)):
        assert (values[tensor.name] == checkpoint.read(tensor, whole(tensor.shape))).all()


def _sharded(folder, **changes):
    """A model in two files with an index, and the same in one file."""
    model, one = _small_file(folder / "one")
    names = {t.name: f"{k % 2}.safetensors" for k, t in enumerate(model.tensors)}
    index = {}
    for file in set(names.values()):
        mine = [t for t in model.tensors if names[t.name] == file]
        values = [(t, np.ones(t.shape, numpy_dtype(t.dtype))) for t in mine]
        write_safetensors(folder / file, values)
        index |= dict.fromkeys(Checkpoint(folder / file).names(), file)
    index = {"metadata": {}, "weight_map": index} | changes
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return model, one


def test_a_checkpoint_of_several_files_is_read_by_its_index(tmp_path):
    """Every model that does not fit one file is published like this."""
    (tmp_path / "m").mkdir()
    model, one = _sharded(tmp_path / "m")
    (tmp_path / "m" / "one").unlink()
    for path in (tmp_path / "m", tmp_path / "m" / "model.safetensors.index.json"):
        found = Checkpoint(path)
        found.check(model)

        assert sorted(one.names()) == sorted(found.names())
        for tensor in model.tensors:
            assert (one.read(tensor, whole(tensor.shape))
                    == found.read(tensor, whole(tensor.shape))).all()  # fmt: skip
    with pytest.raises(tep.UsageError, match="no tensor 'x' among its"):
        found.read(Tensor("x", (2,), "bf16", 0), whole((2,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": {"a": "../0.safetensors"}}, "no weight_map"),
        ({"weight_map": {"a": 3}}, "no weight_map"),
        ({"weight_map": {"a": "9.safetensors"}}, "9.safetensors is not beside it"),
        ({"weight_map": {"a": "0.safetensors"}}, r"index and 0.safetensors differ .*'a'"),
    ],
)
def test_an_index_that_lies_is_refused(change, message, tmp_path):
    """A tensor that it forgets is never updated; a path out of the folder is somebody else's."""
    _sharded(tmp_path, **change)

    with pytest.raises(tep.UsageError, match=message):
        Checkpoint(tmp_path)


def test_a_folder_needs_one_file_or_an_index(tmp_path):
    """Without an index nobody knows which of several files belong together."""
    with pytest.raises(tep.UsageError, match=r"0 files \*.safetensors; 1 is wanted"):
        Checkpoint(tmp_path)
    _, one = _small_file(tmp_path / "a.safetensors")

    assert one.names() == Checkpoint(tmp_path).names()
