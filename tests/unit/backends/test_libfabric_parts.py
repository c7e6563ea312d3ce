"""Rooms of the libfabric backend that need no NIC: addresses, frames, slots, EFA."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tep
from tep.backends import libfabric
from tep.backends.base import Status, WriteBatch, new_completions
from tep.backends.ffi import libfabric as fi
from tep.backends.ffi.libc import ip_address
from tep.backends.libfabric import frames, rules
from tep.backends.libfabric.completions import Queue
from tep.backends.libfabric.objects import bounds, mr_attr
from tep.backends.libfabric.rules import RULES, NicAddress, Rules, parse
from tep.backends.libfabric.slots import Slots, Ticket
from tep.base.errors import BackendUnavailable, BadDescriptor, FabricError, UsageError
from tep.host.ways import is_loopback
from tep.memory.source import adapt
from tests.support.here import need_libfabric

LOOPBACK = (
    struct.pack("<H", socket.AF_INET) + struct.pack(">H", 4000) + bytes([127, 0, 0, 1]) + bytes(8)
)


# ---------------------------------------------------------------- addresses


def test_an_address_is_an_array_with_a_tag():
    """Peers of other releases read these bytes."""
    data = NicAddress("tcp", 7, "127.0.0.1", LOOPBACK).to_bytes()

    assert ["OFI3", "tcp", 7, "127.0.0.1", LOOPBACK] == msgspec.msgpack.decode(data)
    assert NicAddress("tcp", 7, "127.0.0.1", LOOPBACK) == parse(data, "tcp")


def test_a_long_name_gives_way():
    """An address travels in a field of 256 bytes, whatever a device is called."""
    data = NicAddress("tcp", 7, "n" * 300, LOOPBACK).to_bytes()

    assert 240 < len(data) <= 256
    assert LOOPBACK == parse(data, "tcp").raw


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "0 bytes"),
        (bytes(16), "family 0"),
        (struct.pack("<H", 99) + LOOPBACK[2:], "family 99"),
        (LOOPBACK[:15], "15 bytes"),
        (LOOPBACK[:2] + b"\0\0" + LOOPBACK[4:], "port 0"),
    ],
)
def test_what_would_poison_the_address_vector_is_refused(raw, why):
    """tcp takes one address of a wrong family in silence, and refuses every good one after it."""
    data = NicAddress("tcp", 7, "lo", raw).to_bytes()
    with pytest.raises(BadDescriptor, match=why):
        parse(data, "tcp")


def test_providers_do_not_mix():
    """A tcp endpoint given an address of EFA would look for it for ever."""
    data = NicAddress("efa", 7, "rdmap0s6", bytes(range(32))).to_bytes()
    with pytest.raises(BadDescriptor, match="'efa', this one by 'tcp'"):
        parse(data, "tcp")
    assert bytes(range(32)) == parse(data, "efa").raw


@given(st.binary(max_size=300))
def test_any_bytes_are_an_address_or_refused(data):
    """Bytes from a peer are hostile: only BadDescriptor may come out."""
    for provider in RULES:
        try:
            parse(data, provider)
        except BadDescriptor:
            continue


# ---------------------------------------------------------------- frames


@given(st.binary(max_size=300))
def test_any_bytes_are_a_frame_or_nothing(data):
    """Whoever can reach the port can send anything."""
    found = frames.decode(memoryview(data))

    assert found is None or frames.decode(memoryview(frames.encode(found))) == found


def test_frames_fit_their_head_room():
    """A message of the greatest length must fit the buffer that was made for it."""
    sender = b"x" * 256
    payload = b"y" * 65536
    for frame in (
        frames.Data(sender, 2**64 - 1, payload),
        frames.Control(sender, 2**64 - 1, payload),
        frames.Lease(sender, 2**63, 2**63, 2**63),
        frames.Hello(sender, 2**64 - 1),
    ):
        extra = len(getattr(frame, "payload", b""))
        assert len(frames.encode(frame)) <= extra + frames.HEAD_BYTES_MAX


# ---------------------------------------------------------------- slots


class FakePeer:
    def __init__(self):
        self.open = self.adrift = 0
        self.heard = False
        self.number = 3


class FakeRegion:
    def __init__(self):
        self.open = 0
        self.desc = 0


ENDPOINT = fi.ready(1 << 40)


class Card:
    """fi_writemsg as a NIC would see it: reads the descriptors behind the pointers."""

    def __init__(self, room):
        self.room = room
        self.rows = []
        kind = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
        self._callback = kind(self.take)
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        self.writemsg = fi.bind(address, "fi_ops_rma.writemsg", hold_gil=True, readied=True)

    def take(self, endpoint, pointer, flags):
        assert endpoint == 1 << 40
        if len(self.rows) >= self.room:
            return -fi.FI_EAGAIN
        msg = (ctypes.c_uint64 * 8).from_address(pointer)
        src, src_len = (ctypes.c_uint64 * 2).from_address(msg[0])
        dst, dst_len, key = (ctypes.c_uint64 * 3).from_address(msg[4])
        assert (1, 1) == (msg[2], msg[5])
        assert src_len == dst_len
        self.rows.append((src, src_len, dst, key, msg[3], msg[6], msg[7], flags))
        return 0


def a_batch(n, nbytes=64):
    at = np.arange(n, dtype=np.uint64)
    lengths = nbytes if isinstance(nbytes, int) else np.array(nbytes, np.uint64)
    return WriteBatch(n, 0, 1000 + at, 1, 5000 + at, 77, lengths, at.astype(np.uint32), ctx=9)


@pytest.mark.parametrize("nbytes", [64, [1, 2, 3, 4, 5, 6]])
def test_descriptors_hold_their_rows_and_a_full_queue_takes_a_prefix(nbytes):
    """A wrong word in a descriptor is a write to a wrong place; a lost row a hang."""
    slots, card, peer, region = Slots(8, flags=1), Card(room=4), FakePeer(), FakeRegion()
    batch = a_batch(6, nbytes)
    taken = slots.post(card.writemsg, ENDPOINT, Ticket(batch, 0, peer, region, 0.0), 6)
    lengths = [64] * 6 if nbytes == 64 else nbytes

    assert 4 == taken == slots.open == peer.open
    assert [(1000 + k, lengths[k], 5000 + k, 77, 3) for k in range(4)] == [r[:5] for r in card.rows]
    assert [0, 1, 2, 3] == [row[6] for row in card.rows]
    assert {1 | fi.FI_REMOTE_CQ_DATA} == {row[7] for row in card.rows}
    contexts = [row[5] for row in card.rows]
    assert all(context % 64 == 0 for context in contexts), "a fi_context2 has its own cache line"
    assert 4 == len(set(contexts))


def test_rows_come_back_once_and_in_any_order():
    """EFA completes out of order; a slot given away twice would end somebody else's row."""
    slots, card, peer, region = Slots(64, flags=0), Card(room=100), FakePeer(), FakeRegion()
    slots.post(card.writemsg, ENDPOINT, Ticket(a_batch(40), 0, peer, region, 0.0), 40)
    contexts = [row[5] for row in card.rows]
    shuffled = [contexts[k] for k in np.random.default_rng(3).permutation(40)]

    assert {9: 10} == slots.give_back(shuffled[:10])
    assert {9: 29} == slots.give_back_many(np.array(shuffled[10:39], np.int64))
    assert 9 == slots.take_back(shuffled[39]).batch.ctx
    assert (0, 0, 0, 0) == (slots.open, slots.nbytes, peer.open, region.open)
    assert {} == slots.tickets
    with pytest.raises(AssertionError, match="completed twice"):
        slots.give_back([shuffled[0]])


def test_rows_that_were_given_up_do_not_come_back_as_others():
    """A silent peer's row that completes after all must not be taken for a new one in its slot."""
    slots, card, peer, region = Slots(4, flags=0), Card(room=100), FakePeer(), FakeRegion()
    ticket = Ticket(a_batch(4), 0, peer, region, 0.0)
    slots.post(card.writemsg, ENDPOINT, ticket, 4)
    contexts = [row[5] for row in card.rows]
    slots.give_back([contexts[1]])
    rows = slots.give_up(ticket, gone=False)
    again = Ticket(a_batch(4), 0, peer, region, 0.0)
    slots.post(card.writemsg, ENDPOINT, again, 4)

    assert [0, 2, 3] == rows
    assert not set(contexts[2:]) & {row[5] for row in card.rows[4:]}
    assert 2 == region.open, "libfabric may still read the source of the rows that were given up"
    assert {} == slots.give_back([contexts[2]])
    assert slots.take_failed(contexts[3]) is None
    assert (4, 2) == (slots.open, region.open)
    assert slots.take_back(contexts[0]) is None
    assert (4, 1, 4 * 64) == (slots.open, region.open, slots.nbytes)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=40))
def test_slots_are_never_lost(moves):
    """Whatever is posted and returned: what is open, free and owned adds up."""
    slots, card, peer, region = Slots(32, flags=0), Card(room=10**6), FakePeer(), FakeRegion()
    out = []
    for posting, count in moves:
        if posting and slots.room:
            n = min(count, slots.room)
            seen = len(card.rows)
            slots.post(card.writemsg, ENDPOINT, Ticket(a_batch(n), 0, peer, region, 0.0), n)
            out += [row[5] for row in card.rows[seen:]]
        elif out:
            part, out = out[:count], out[count:]
            slots.give_back(part)
        assert len(out) == slots.open == peer.open
        assert len(set(out)) == len(out)
        assert 64 * slots.open == slots.nbytes


# ---------------------------------------------------------------- regions


@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=9
    )
)
def test_bounds_never_wrap(rows):
    """A row that wraps around 2^64 must not look as if it lay inside."""
    starts = np.array([start for start, _ in rows], np.uint64)
    lengths = np.array([length for _, length in rows], np.uint64)
    first, end = bounds(starts, lengths)

    assert first == min(start for start, _ in rows)
    true_end = max(start + length for start, length in rows)
    assert end == true_end if true_end < 2**64 else end >= 2**64
    assert (int(starts.min()), int(starts.max()) + 5) == bounds(starts, 5)


def test_host_and_device_memory_are_described_to_the_header():
    """A descriptor of device memory in the wrong words registers somebody else's pages."""
    host = adapt(bytearray(4096))
    attr, flags, kept = mr_attr(host, fi.FI_WRITE)
    where = fi.C.iovec.from_address(attr.mr_iov)

    assert (host.ptr, 4096, 1, 0) == (where.iov_base, where.iov_len, attr.iov_count, flags)
    assert not attr.access & fi.FI_REMOTE_WRITE
    assert kept is not None

    device = adapt((0x7000_0000_0000, 65536, "cuda:3"))
    attr, flags, kept = mr_attr(device, fi.FI_WRITE | fi.FI_REMOTE_WRITE, dmabuf=(42, 8192))
    exported = fi.C.fi_mr_dmabuf.from_address(attr.mr_iov)

    assert (fi.FI_HMEM_CUDA, 3) == (attr.iface, attr.device.cuda)
    assert fi.FI_MR_DMABUF == flags
    assert attr.access & fi.FI_REMOTE_WRITE
    # Its first byte is called base_addr + offset by peers.
    assert (42, 8192, 65536, 0x7000_0000_0000 - 8192) == (
        exported.fd, exported.offset, exported.len, exported.base_addr,
    )  # fmt: skip
    assert kept is not None


# ---------------------------------------------------------------- EFA, dry


class FakeEndpoint:
    def __init__(self, emulated):
        self.emulated = emulated

    def option(self, option):
        assert option in {fi.FI_OPT_EFA_EMULATED_WRITE, fi.FI_OPT_EFA_EMULATED_READ}
        return self.emulated


def test_a_device_without_rdma_write_is_refused():
    """p4d would imitate writes by messages, many times slower, and nobody would know why."""
    with pytest.raises(BackendUnavailable, match="lacks RDMA write or RDMA read"):
        rules.check_device(FakeEndpoint(emulated=True), "rdmap0s6")
    rules.check_device(FakeEndpoint(emulated=False), "rdmap0s6")
    rules.check_device(FakeEndpoint(emulated=None), "rdmap0s6")  # an older provider does not say


def test_efa_options_are_set_only_where_they_exist():
    """FI_OPT_CUDA_API_PERMITTED without CUDA is refused (-22), and the endpoint with it."""
    unsolicited = fi.FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV, False, False
    plain = rules.endpoint_options(cuda=False)
    assert ((11, False, True), unsolicited) == plain
    full = rules.endpoint_options(cuda=True)
    assert ((11, False, True), unsolicited, (10, False, True)) == full


def test_efa_errors_have_our_names():
    """A bad key that is called unreachable takes a healthy NIC out of service."""
    assert Status.REMOTE_KEY is rules.STATUSES[7]
    assert Status.UNREACHABLE is rules.STATUSES[13]
    assert Status.LOCAL_KEY is rules.STATUSES[5]
    assert Status.UNREACHABLE is rules.STATUSES[4124] is rules.STATUSES[4126]
    assert 0 not in rules.STATUSES


@pytest.mark.parametrize("hold_gil", [False, True])
def test_binding_a_call_makes_no_new_class(hold_gil):
    """A class for each endpoint is garbage in a circle, which only the collector takes away."""
    name, call = "fi_ops_rma.writemsg", ctypes.CFUNCTYPE(ctypes.c_ssize_t)(lambda: 0)
    address = ctypes.cast(call, ctypes.c_void_p).value
    bound = [fi.bind(address, name, hold_gil=hold_gil) for _ in range(2)]

    assert type(bound[0]) is type(bound[1])


def test_explain_says_that_no_row_goes_past_an_efa_nic(monkeypatch):
    """Dry run, with tcp in EFA's place: a bypass nobody sees makes the NIC's figures a riddle."""
    need_libfabric()
    asked = []
    dry = Rules(provider="tcp", names=RULES["tcp"].names)
    monkeypatch.setattr(libfabric, "RULES", {"efa": dry})
    monkeypatch.setattr(libfabric, "endpoint_options", lambda **how: asked.append(how) or ())
    with tep.TransferEngine.open("libfabric", provider="efa", nics=1) as engine:
        assert "all peers by the NIC" in engine.explain()
    assert [{"cuda": False}] == asked


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("10.0.0.127", False),
        ("::1", True),
        ("::2", False),
    ],
)
def test_loopback_addresses_are_known(text, expected):
    """No other host reaches one: its engine would be waited for until the timeout."""
    v6 = ":" in text
    family = socket.AF_INET6 if v6 else socket.AF_INET
    packed = socket.inet_pton(family, text)
    raw = struct.pack("<H", family) + struct.pack(">H", 4000) + bytes(4 * v6) + packed

    assert expected == is_loopback(ip_address(raw + bytes(8 - 4 * v6)))


@pytest.mark.parametrize("nics", [0, 65, [], ["lo"] * 65, "lo"])
def test_impossible_numbers_of_nics_are_refused(nics):
    """A typo is found before anything is opened, and the largest number is no typo."""
    libfabric.check_nics(64)
    libfabric.check_nics(["lo"] * 64)
    with pytest.raises(UsageError, match="1 to 64"):
        libfabric.check_nics(nics)


@pytest.mark.parametrize("filtered", ["", "tcp"])
def test_a_variable_that_hides_providers_is_named(monkeypatch, filtered):
    """It is in a job script that somebody else wrote."""
    need_libfabric()
    monkeypatch.setenv("FI_PROVIDER", filtered)
    tried = [why for step, why in libfabric.facts()["tried"] if step.startswith("provider ")]

    assert tried
    assert all(bool(filtered) == ("FI_PROVIDER='tcp' filters it" in why) for why in tried)


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("rc", [0, -errno.ENOPROTOOPT, -errno.EINVAL])
def test_an_option_may_be_unknown_unless_it_is_needed(monkeypatch, needed, rc):
    """Older providers do not know all; but what they refuse for another reason is an error."""
    need_libfabric()
    true = fi.op

    def op(ops, name, **how):
        return (lambda *_: rc) if name == "setopt" else true(ops, name, **how)

    with contextlib.closing(libfabric.open_domains(provider="tcp", nics=1).domains[0]) as domain:
        monkeypatch.setattr(fi, "op", op)
        fails = rc == -errno.EINVAL or (rc and needed)
        with pytest.raises(FabricError, match="fi_setopt") if fails else contextlib.nullcontext():
            domain.nic.open_endpoint(((99, True, needed),))
        assert "refused" not in domain.status_text(Status.PROVIDER), "no post was"


def test_an_address_where_nothing_is_mapped_is_refused():
    """Software providers register anything, and crash the process once a row arrives."""
    need_libfabric()
    with (
        tep.TransferEngine.open("libfabric", provider="tcp", nics=1) as engine,
        pytest.raises(FabricError, match="64 bytes at 0x1000 are not all mapped"),
    ):
        engine.reg_mr((0x1000, 64, "cpu"))


def test_explain_says_what_done_means():
    """Rows that are called done and never arrive would be a surprise: it must be in sight."""
    need_libfabric()
    with tep.TransferEngine.open("libfabric", nics=1) as engine:
        assert "a row is done once it is at the target" in engine.explain()
        assert "provider tcp of libfabric" in engine.explain()


def test_info_names_the_providers_that_tep_drives_and_no_others():
    """Whoever reads of shm, or of udp, tries to open it."""
    need_libfabric()
    drives = {name for one in RULES.values() for name in one.names}

    assert set(libfabric.facts()["providers"]) <= drives
    assert "shm" not in libfabric.probe()


@pytest.mark.parametrize("cuda", [False, True])
def test_efa_hints_ask_for_what_efa_needs(cuda):
    """Dry run: the hints for an instance, read back from libfabric's own fi_info."""
    lib = need_libfabric()
    with lib.hints() as hints:
        libfabric.fill(lib, hints, RULES["efa"], "efa", cuda=cuda)
        hint = hints.contents
        mode = hint.domain_attr.contents.mr_mode
        caps = fi.FI_MSG | fi.FI_RMA | fi.FI_LOCAL_COMM | fi.FI_REMOTE_COMM
        wants = fi.FI_MR_LOCAL | fi.FI_MR_VIRT_ADDR | fi.FI_MR_ALLOCATED | fi.FI_MR_PROV_KEY

        assert caps | (fi.FI_HMEM if cuda else 0) == hint.caps
        assert wants | (fi.FI_MR_HMEM if cuda else 0) == mode
        assert hint.mode & fi.FI_CONTEXT2
        assert fi.FI_EP_RDM == hint.ep_attr.contents.type
        assert b"efa" == ctypes.string_at(hint.fabric_attr.contents.prov_name)


def test_a_release_that_is_too_old_for_efa_is_refused():
    """It may imitate writes by messages, in silence."""
    with pytest.raises(BackendUnavailable, match=r"1\.20 is too old for EFA"):
        rules.check_version("rdmap0s6", (1, 20))


def test_a_shortage_that_is_over_costs_the_polls_after_it_nothing(monkeypatch):
    """An engine that never sleeps read its queue twice in each poll, from then on."""
    need_libfabric()
    domain = libfabric.open_domains(provider="tcp", nics=["127.0.0.1"]).domains[0]
    out, reads = new_completions(8), []
    healthy = Queue.read

    def read(queue, *args):
        reads.append(0)
        if len(reads) == 1:
            raise MemoryError
        return healthy(queue, *args)

    with contextlib.closing(domain):
        monkeypatch.setattr(Queue, "read", read)
        counts = []
        for _ in range(5):
            before = len(reads)
            domain.poll(out)
            counts.append(len(reads) - before)
    assert [1, 2, 2, 1, 1] == counts
