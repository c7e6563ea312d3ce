"""The mirrors of libibverbs' structs against the C compiler's, and against facts written down.

The compiler is asked where it and the header are here; the facts (ibverbs.facts beside this file,
made by this file's `main`) are compared everywhere, so that a mirror cannot drift unseen.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tep.backends.ffi import ibverbs
from tep.backends.ffi.ibverbs import ENUMS, C
from tests.support.cross import printed, require_cross

FACTS = Path(__file__).with_name("ibverbs.facts")
HEADER = Path("/usr/include/infiniband/verbs.h")

STRUCTS = {
    name: mirror
    for name, mirror in vars(C).items()
    if issubclass(mirror, ctypes.Structure) and name != "_ibv_device_ops"
}
DTYPES = {
    "ibv_send_wr": ibverbs.SEND_WR,
    "ibv_recv_wr": ibverbs.RECV_WR,
    "ibv_sge": ibverbs.SGE,
    "ibv_wc": ibverbs.WC,
}
# C's way to a field, where a union stands in between.
MEMBERS = {
    ("ibv_send_wr", "remote_addr"): "wr.rdma.remote_addr",
    ("ibv_send_wr", "rkey"): "wr.rdma.rkey",
    ("ibv_send_wr", "ah"): "wr.ud.ah",
    ("ibv_send_wr", "remote_qpn"): "wr.ud.remote_qpn",
    ("ibv_send_wr", "remote_qkey"): "wr.ud.remote_qkey",
}

# Mirrored up to the last member that is used.
PREFIXES = {"ibv_context", "ibv_comp_channel", "ibv_port_attr", "ibv_qp"}

# Mirrored from a member on, from which their offsets count.
SUFFIXES = {"verbs_context": "create_qp_ex"}


def mirrored(structs=STRUCTS):
    """Return the facts of the mirrors: name -> numbers."""
    found = {}
    for name, mirror in structs.items():
        if name not in {*PREFIXES, *SUFFIXES}:
            found[f"size struct {name}"] = (ctypes.sizeof(mirror),)
        for field in mirror._fields_:
            place = getattr(mirror, field[0])
            if (name, field[0]) == ("verbs_context", "context"):
                found[f"field struct {name} {field[0]}"] = (place.offset, 0)  # see PREFIXES
                continue
            found[f"field struct {name} {field[0]}"] = (place.offset, place.size)
    found["size union ibv_gid"] = (ctypes.sizeof(C.ibv_gid),)
    for name, dtype in DTYPES.items():
        found[f"size struct {name}"] = (dtype.itemsize,)
        for field in dtype.names:
            form, offset = dtype.fields[field][:2]
            found[f"field struct {name} {field}"] = (offset, form.itemsize)
    found.update((f"enum {name}", (value,)) for name, value in ENUMS.items())
    return found


def c_program():
    """A program that prints the same facts as the compiler sees them."""
    lines = [
        "#include <stdio.h>",
        "#include <stddef.h>",
        "#include <infiniband/verbs.h>",
        '#define S(k, t) printf("size " #k " " #t " %zu\\n", sizeof(k t))',
        '#define P(t, f, o, s) printf("field struct " #t " " #f " %zu %zu\\n", o, s)',
        "#define F(t, f, p) P(t, f, offsetof(struct t, p), sizeof(((struct t *)0)->p))",
        '#define E(n) printf("enum " #n " %lld\\n", (long long)(n))',
        "int main(void) {",
    ]
    for name, mirror in STRUCTS.items():
        if name not in {*PREFIXES, *SUFFIXES}:
            lines.append(f"S(struct, {name});")
        lines += [_field(name, field[0]) for field in mirror._fields_]
    lines.append("S(union, ibv_gid);")
    for name, dtype in DTYPES.items():
        lines.append(f"S(struct, {name});")
        for field in dtype.names:
            lines.append(f"F({name}, {field}, {MEMBERS.get((name, field), field)});")
    lines += [f"E({name});" for name in ENUMS]
    return "\n".join([*lines, "return 0; }"])


def _field(struct, field):
    """The line that prints where a member is."""
    first = SUFFIXES.get(struct)
    if first is None:
        return f"F({struct}, {field}, {field});"
    nbytes = "0" if field == "context" else f"sizeof(((struct {struct} *)0)->{field})"
    at = f"offsetof(struct {struct}, {field}) - offsetof(struct {struct}, {first})"
    return f"P({struct}, {field}, {at}, {nbytes});"


def parse(text):
    """Facts from lines of words and numbers."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        names = [word for word in words if not re.fullmatch(r"-?\d+", word)]
        found[" ".join(names)] = tuple(map(int, words[len(names) :]))
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return the compiler's facts."""
    if shutil.which("gcc") is None or not HEADER.exists():
        pytest.skip("no gcc or no <infiniband/verbs.h>; apt install gcc libibverbs-dev")
    return compiled_facts(tmp_path_factory.mktemp("abi"))


def compiled_facts(folder, text=None):
    """Compile and run the program, or another one."""
    source, program = folder / "abi.c", folder / "abi"
    source.write_text(text or c_program())
    subprocess.run([shutil.which("gcc"), "-o", program, source], check=True)
    return parse(subprocess.run([program], check=True, capture_output=True, text=True).stdout)


def differences(left, right):
    """Facts that two sources do not agree on."""
    names = [*left, *(name for name in right if name not in left)]
    return [f"{n}: {left.get(n)} != {right.get(n)}" for n in names if left.get(n) != right.get(n)]


def test_mirrors_agree_with_the_compiler(compiled):
    """A field at the wrong place sends a NIC to the wrong memory."""
    assert [] == differences(compiled, mirrored())
    assert len(mirrored()) > 250


def test_mirrors_agree_with_the_compiler_of_aarch64(tmp_path):
    """Grace has no tests of its own here: one field elsewhere would send a NIC to wrong memory."""
    require_cross("infiniband/verbs.h")
    found = parse(printed(tmp_path, c_program()))

    assert [] == differences(found, mirrored())
    assert len(mirrored()) == len(found)


def test_mirrors_agree_with_the_facts():
    """On machines without the header, what was true where there was one still holds."""
    assert [] == differences(parse(FACTS.read_text()), mirrored())


def test_the_extended_calls_are_found_behind_the_mutex(tmp_path):
    """The marker that they are there stands behind a mutex, whose size the machine decides."""
    if shutil.which("gcc") is None or not HEADER.exists():
        pytest.skip("no gcc or no <infiniband/verbs.h>; apt install gcc libibverbs-dev")
    found = compiled_facts(tmp_path, EXTENDED)
    machine = platform.machine()

    assert {"field abi_compat": (ibverbs.ABI_COMPAT_OFFSETS[machine],)} == found


def test_so_they_are_on_aarch64(tmp_path):
    """Its mutex is longer by 8 bytes."""
    require_cross("infiniband/verbs.h")
    found = parse(printed(tmp_path, EXTENDED))

    assert {"field abi_compat": (ibverbs.ABI_COMPAT_OFFSETS["aarch64"],)} == found


EXTENDED = """
#include <stdio.h>
#include <stddef.h>
#include <infiniband/verbs.h>
int main(void) {
printf("field abi_compat %zu\\n", offsetof(struct ibv_context, abi_compat));
return (uintptr_t)__VERBS_ABI_IS_EXTENDED != UINT64_MAX; }
"""


def test_a_gid_taken_for_bytes_is_noticed(compiled):
    """The planted case: an array of 16 bytes is aligned to 1, and ibv_qp_attr loses 4 bytes."""

    class ByteGid(ctypes.Structure):
        _fields_ = (("raw", ctypes.c_uint8 * 16),)

    def planted(mirror, **types):
        fields = [(name, types.get(name, form)) for name, form in mirror._fields_]
        return type(mirror.__name__, (ctypes.Structure,), {"_fields_": fields})

    route = planted(C.ibv_global_route, dgid=ByteGid)
    address = planted(STRUCTS["ibv_ah_attr"], grh=route)
    attr = planted(C.ibv_qp_attr, ah_attr=address, alt_ah_attr=address)
    wrong = {**STRUCTS, "ibv_global_route": route, "ibv_ah_attr": address, "ibv_qp_attr": attr}
    found = differences(compiled, mirrored(wrong))

    assert "size struct ibv_qp_attr: (144,) != (140,)" in found


def test_declarations_are_word_for_word():
    """Words that drift from the header mislead whoever checks the code against it."""
    if not HEADER.exists():
        pytest.skip("no <infiniband/verbs.h>; apt install libibverbs-dev")
    header = _words(HEADER.read_text())
    source = Path(ibverbs.__file__).read_text()
    declared = re.findall(r'(?:mirror|prototypes)\("""\n(.*?)"""', source, re.DOTALL)
    quoted = [
        _words(declaration)
        for text in declared
        for declaration in re.findall(
            r"^(?:(?:struct|union) \w+ \{.*?^\};|[a-z].*?\);)$", text, re.MULTILINE | re.DOTALL
        )
    ]
    for name, first in SUFFIXES.items():  # the header has more in front of these
        quoted = [re.sub(rf"struct {name} {{.*?(?=[^;{{]*{first})", "", each) for each in quoted]

    assert quoted
    begun = [declaration.removesuffix("};") for declaration in quoted]  # see PREFIXES
    assert [] == [declaration for declaration in begun if declaration not in header]


def _words(text):
    return " ".join(re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL).split())


def main():
    """Write the facts down anew, from the compiler."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = compiled_facts(Path(folder))
    lines = (" ".join([name, *map(str, values)]) for name, values in found.items())
    FACTS.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
