"""The page that says who is trusted with what has the limits of the code."""

from __future__ import annotations

import re
from pathlib import Path

import tep
from tep.apps.kvcache.blocks import cache
from tep.compat.nixl import channel, listener
from tep.integrations.vllm import holds
from tep.rendezvous import calls

PAGE = Path(tep.__file__).parents[1] / "docs" / "concepts" / "trust.md"


def test_the_limits_on_the_page_are_those_of_the_code():
    """A machine sized by the page would run out of memory."""
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    limits = {
        "unfinished notes": (
            *(cache.NOTES_PEER_MAX, cache.PIECES_PEER_MAX, cache.NOTE_BYTES, cache.UNFINISHED_MAX),
        ),
        "answers on their way": (cache.OUT_MAX,),
        "loads of one key": (holds.SENDS_MAX,),
        "pieces out of order": (channel.EARLY_MAX, channel.PIECE),
        "being put together": (channel.BODY_MAX,),
        "waits for its name": (channel.HELD_MAX, 2 * channel.BODY_MAX),
        "agents that have spoken": (channel.AGENTS_MAX,),
        "a call of its listener": (listener.BYTES_MAX,),
        "a control frame": (calls.FRAME_MAX,),
    }
    for what, numbers in limits.items():
        (row,) = [row for row in rows if what in row]
        for number in numbers:
            assert f"{number:,}" in re.findall(r"[0-9,]*[0-9]", row), row
