"""Extensions of two NICs beyond the standard: agreed on as they connect, or left out by both."""

from __future__ import annotations

import time

import pytest

from tep.backends.base import new_completions
from tep.backends.verbs import open_domains


@pytest.mark.parametrize("asking", ["a", "b", "both"])
@pytest.mark.parametrize(
    ("here", "there", "options", "expected"),
    [
        (0b1110, 0b0111, {}, 0b0110),
        (0b1110, 0, {}, 0),
        (0, 0, {}, 0),
        (0b1110, 0b0111, {"ece": False}, 0),
    ],
)
def test_both_ends_use_what_both_can_do(stub, asking, here, there, options, expected):
    """One end that uses more than the other knows: packets that it does not understand."""
    stub.ece(0, here)
    stub.ece(1, there)
    options = {"library": stub.path, "handshake_s": 1.0, "resend_s": 0.01, **options}
    a, b = (open_domains([f"stub{k}"], name=f"n{k}", **options).domains[0] for k in range(2))
    for name, nic, other in (("a", a, b), ("b", b, a)):
        if asking in {name, "both"}:
            nic.connect(other.address)
    out, end_s = new_completions(8), time.monotonic() + 5
    while not (any(a.peers.up) and any(b.peers.up)):
        a.poll(out)
        b.poll(out)
        assert time.monotonic() < end_s, "they do not connect"
    conns = [nic.peers.up[0] for nic in (a, b)]
    found = {stub.ece_in_use(number) for conn in conns for number, _ in conn.ids}
    told = {conn.ece[1] for conn in conns}
    for nic in (a, b):
        nic.close()

    assert {expected} == found == told
