"""The tables of tep/apps/moe/README.md against the bytes that are written."""

from __future__ import annotations

import re
import struct
from importlib.resources import files

import numpy as np
import pytest

from tep.apps.moe import MoeConfig
from tep.apps.moe.config import Layout, sort_copies
from tep.apps.moe.payload import Payload
from tep.apps.moe.proxy import COMBINED, call_imms, imm_of

CONFIG = MoeConfig(num_experts=8, topk=2, hidden=20, max_tokens=4, world=4, num_scales=3)
BASE = CONFIG.imm_base


def table(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the page."""
    page = files("tep.apps.moe").joinpath("README.md").read_text(encoding="utf-8")
    below = page.split(f"### {heading}\n")[1].split("\n#")[0]
    rows = [line.strip("|").split("|") for line in below.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.fixture
def payload() -> Payload:
    return Payload(CONFIG, 1, np.zeros(Layout.of(CONFIG).nbytes, np.uint8))


def fields(heading: str, raw: bytes) -> dict[str, int]:
    """Read every field of fixed size where the table says it is."""
    return {
        name: int.from_bytes(raw[int(offset) : int(offset) + int(size)], "little")
        for offset, size, name in table(heading)
        if size.isdigit()
    }


def test_token_header(payload) -> None:
    """The page must give a kernel's author turn, token, expert and weight."""
    batch = sort_copies(np.array([[6, 1]]), CONFIG)
    given = np.full((1, 20), 7, np.uint8), np.full((1, 12), 9, np.uint8)
    payload.stage(5, batch, given, np.array([[0.25, 0.75]], np.float32))
    slots = payload.arena[: 2 * CONFIG.dispatch_stride].reshape(2, -1)
    heads = [fields("Token copy", slot[CONFIG.header_at :].tobytes()) for slot in slots]

    assert [(5, 0, 1), (5, 0, 6)] == [(h["turn"], h["token"], h["expert"]) for h in heads]
    weights = [struct.unpack("<f", struct.pack("<I", head["weight"]))[0] for head in heads]
    assert [0.75, 0.25] == weights
    assert [7] * 20 == slots[0][:20].tolist()
    assert [9] * 12 == slots[0][32:44].tolist()  # activations take 20 bytes, rounded up to 32
    assert 32 + 16 == CONFIG.header_at


def test_route(payload) -> None:
    """A count read from the wrong place sends tokens into somebody's memory."""
    payload.write_route(3, np.arange(8))
    layout = payload.layout
    raw = payload.arena[layout.routes_out :][: layout.route_bytes].tobytes()
    counts_at = int(table("Route")[-1][0])

    assert {"turn": 3, "source": 1, "zero": 0} == fields("Route", raw)
    assert list(range(8)) == np.frombuffer(raw[counts_at:], np.uint32).tolist()


def test_immediates() -> None:
    """Two meanings of one number would be counted for each other."""
    made = {
        ("0", "turn"): (imm_of(BASE, 1234, COMBINED), 1234),
        ("0", "kind"): (imm_of(BASE, 1234, COMBINED), COMBINED),
        ("1", "has ended: try"): (call_imms(BASE)[31 * 1024 + 77], 31),
        ("1", "has ended: rank"): (call_imms(BASE)[31 * 1024 + 77], 77),
    }
    said = {
        (which, next(name for w, name in made if w == which and field.startswith(name))): bits
        for which, field, bits in table("Immediates")
    }

    assert set(made) == set(said)
    for key, (imm, value) in made.items():
        high, low = map(int, re.fullmatch(r"(\d+)-(\d+)", said[key]).groups())
        assert value == imm >> low & (1 << high - low + 1) - 1, key
        assert BASE >> 28 == imm >> 28
        assert int(key[0]) == imm >> 26 & 3, key
