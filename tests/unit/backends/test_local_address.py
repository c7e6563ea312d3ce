"""The address of a local NIC: golden bytes, and everything that is none."""

from __future__ import annotations

import errno
import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import tep
from tep.backends import local
from tep.backends.local import open_domains, probe
from tep.backends.local.channel import Address, host_digest
from tep.base.errors import BadDescriptor, UsageError

HERE = Address(3, 4711, 2**63, host_digest(), bytes(range(16)))


def test_golden_bytes() -> None:
    """Two releases meet on one host: the layout may change only with its tag."""
    raw = replace(HERE, host=b"same-one").to_bytes()

    assert (
        "96a44c4f433303cd1267cf8000000000000000c40873616d652d6f6e65"
        "c410000102030405060708090a0b0c0d0e0f" == raw.hex()
    )


def test_it_survives_bytes_and_names_its_socket() -> None:
    """The address travels in NetAddr, and has to lead to the same socket again."""
    again = Address.from_bytes(HERE.to_bytes())

    assert again == HERE
    assert again.socket == HERE.socket == b"\0tep/4711/8000000000000000/3/00010203"
    assert replace(HERE, epoch=5).socket != HERE.socket


@given(st.binary(max_size=80))
def test_other_bytes_are_refused(data: bytes) -> None:
    """No bytes that were not written as an address are read as one."""
    with pytest.raises(BadDescriptor):
        Address.from_bytes(data)


def test_another_host_is_refused_with_the_way_out() -> None:
    """The socket's name could exist here too, and be somebody else's."""
    other = replace(HERE, host=b"elsewher")
    with pytest.raises(BadDescriptor, match="on another host.*use libfabric"):
        Address.from_bytes(other.to_bytes())


def test_epochs_grow_and_addresses_differ() -> None:
    """A restarted engine must not be taken for its predecessor."""
    opened = [open_domains(2, name="same") for _ in range(3)]
    addresses = {domain.address for one in opened for domain in one.domains}
    for one in opened:
        for domain in one.domains:
            domain.close()

    assert opened[0].epoch < opened[1].epoch < opened[2].epoch
    assert 6 == len(addresses)
    assert {os.getpid()} == {Address.from_bytes(address).pid for address in addresses}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nics": 0}, "nics=0; 1 to 64"),
        ({"nics": 65}, "nics=65; 1 to 64"),
        ({"name": ""}, "name=''; 1 to 200"),
    ],
)
def test_impossible_options_are_named(options, message) -> None:
    """A typo in an option must not become a crash somewhere below."""
    with pytest.raises(UsageError, match=message):
        open_domains(**options)


def test_probe_says_which_ways_are_open() -> None:
    """`tep info` is where people look before they ask."""
    assert "yama" in probe() or "alloc_shared" in probe()


@pytest.mark.parametrize(
    ("scope", "code", "traces", "options", "reason"),
    [
        (0, 0, False, {}, ""),
        (1, 0, False, {}, ""),
        (1, 0, True, {"allow_tracer": False}, "ptrace_scope is 1 and allow_tracer=False"),
        (2, 0, True, {}, ""),
        (2, 0, False, {}, "kernel.yama.ptrace_scope is 2"),
        (3, 0, True, {}, "kernel.yama.ptrace_scope is 3"),
        (0, errno.EPERM, True, {}, "process_vm_readv says EPERM"),
        (0, errno.ENOSYS, True, {}, "process_vm_readv says ENOSYS"),
    ],
)
def test_what_still_works_is_said_at_open(
    monkeypatch, caplog, scope, code, traces, options, reason
) -> None:
    """Else the first row to another process is where people learn it, and by then it has failed."""
    monkeypatch.setattr(local, "_yama_scope", lambda: scope)
    monkeypatch.setattr(local, "can_reach", lambda *_: code)
    monkeypatch.setattr(local, "_may_trace", lambda: traces)
    monkeypatch.setattr(local, "allow_any_tracer", lambda: False)
    local._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "tep"), tep.TransferEngine.open("local", **options) as e:
        said = e.explain()
    local._warn_once.cache_clear()
    local._open_to_tracers.cache_clear()

    for text in (said, probe()) if not options else (said,):
        assert bool(reason) == ("reach memory of tep.alloc_shared() only" in text)
        assert reason in text
    warned = bool(reason) and not options  # who asks for it by an option need not be warned
    assert warned == any("tep.alloc_shared() only" in one for one in caplog.messages)
