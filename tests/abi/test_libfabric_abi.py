"""libfabric's layouts and constants as tep mirrors them, against the compiler and committed facts.

The committed facts are what a C compiler said of Debian's 1.17 headers; they are compared always.
Where headers and a compiler are here, the same C program is compiled and compared anew.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tep.backends.ffi import libfabric
from tep.backends.ffi.libfabric import CQ_DATA_ENTRY, C
from tep.backends.ffi.load import mirror
from tests.support.cross import printed, require_cross

FACTS = Path(__file__).with_name("libfabric_facts.json")
INCLUDE = Path("/usr/include")
HEADERS = ("fabric", "fi_domain", "fi_endpoint", "fi_cm", "fi_rma", "fi_eq", "fi_errno", "fi_ext")
CONSTANTS = {
    name: value & 2**64 - 1
    for name, value in vars(libfabric).items()
    if name.startswith("FI_") and isinstance(value, int)
}
# What the data path fills by numpy alone: slots.py lays them behind each other in one record.
ROWS = mirror("""
struct fi_rma_iov {
    uint64_t addr;
    size_t len;
    uint64_t key;
};
struct fi_msg_rma {
    const struct iovec *msg_iov;
    void **desc;
    size_t iov_count;
    fi_addr_t addr;
    const struct fi_rma_iov *rma_iov;
    size_t rma_iov_count;
    void *context;
    uint64_t data;
};
""")
MIRRORED = (*vars(C).values(), *vars(ROWS).values())
# Fields and constants that 1.17 does not have yet: later releases appended them.
NEWER_FIELDS = {
    "fi_cq_err_entry": {"src_addr"},
    "fi_mr_attr": {"hmem_data", "page_size", "base_mr", "sub_mr_cnt"},
}
NEWER_STRUCTS = {"fi_mr_dmabuf"}
NEWER_CONSTANTS = {
    "FI_MR_DMABUF",
    "FI_OPT_CUDA_API_PERMITTED",
    "FI_OPT_SHARED_MEMORY_PERMITTED",
    "FI_OPT_EFA_EMULATED_READ",
    "FI_OPT_EFA_EMULATED_WRITE",
    "FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV",
}
# What only the library allocates is mirrored up to the last member that tep uses.
LIBRARY_ALLOCATED = {
    *(name for name in vars(C) if name.startswith(("fi_ops", "fid_"))),
    *(f"fi_{part}_attr" for part in ("domain", "ep", "fabric", "link", "rx", "tx")),
}


def ours():
    """Return the mirrors' facts: name -> size, field -> (offset, size), constant -> value."""
    facts = {f"const {name}": value for name, value in CONSTANTS.items()}
    for struct in MIRRORED:
        name = struct.__name__
        facts[f"size {name}"] = ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            where = getattr(struct, field)
            facts[f"field {name}.{field}"] = [where.offset, where.size]
    return facts


def program(skip):
    """A C program that prints the same facts; `skip` names what its headers lack."""
    lines = [f"#include <rdma/{header}.h>" for header in HEADERS]
    lines += [
        "#include <stdio.h>",
        "#include <stddef.h>",
        "#include <sys/uio.h>",
        "int main(void) {",
    ]
    for fact in ours():
        kind, _, name = fact.partition(" ")
        if fact in skip:
            continue
        if kind == "const":
            lines.append(f'printf("{fact}=%llu\\n", (unsigned long long)(long long)({name}));')
        elif kind == "size":
            lines.append(f'printf("{fact}=%zu\\n", sizeof(struct {name}));')
        else:
            struct, _, field = name.partition(".")
            at = f"offsetof(struct {struct}, {field})"
            lines.append(
                f'printf("{fact}=[%zu, %zu]\\n", {at}, sizeof(((struct {struct} *)0)->{field}));'
            )
    return "\n".join([*lines, "return 0; }", ""])


def compiled(folder):
    """Return the compiler's facts, and the names that its headers lack."""
    source, binary = folder / "facts.c", folder / "facts"
    skip = set()
    while True:
        text = program(skip)
        source.write_text(text)
        run = subprocess.run(
            [shutil.which("cc"), "-w", "-I", str(INCLUDE), str(source), "-o", str(binary)],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode == 0:
            break
        lines = text.split("\n")
        found = {
            lines[int(number) - 1]
            for number in re.findall(r"facts\.c:(\d+):\d+: error", run.stderr)
        }
        fresh = {match[1] for line in found if (match := re.search(r'"(.*?)=', line))} - skip
        assert fresh, run.stderr[:2000]
        skip |= fresh
    out = subprocess.run([str(binary)], capture_output=True, text=True, check=True).stdout
    return read(out), skip


def read(text):
    """Facts from lines that a program has printed."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {fact: json.loads(value) for fact, _, value in pairs}


def differences(facts):
    """Facts that the mirrors contradict."""
    mine = ours()
    wrong = {}
    for fact, value in facts.items():
        kind, _, name = fact.partition(" ")
        have = mine[fact]
        if have == value:
            continue
        if kind == "size" and (
            (name in NEWER_FIELDS and have > value) or (name in LIBRARY_ALLOCATED and have < value)
        ):
            continue  # appended fields only; the fields themselves are compared one by one
        wrong[fact] = (have, value)
    return wrong


def test_the_mirrors_agree_with_the_committed_facts():
    """A field that moved would be read from the wrong place, and crash far from its cause."""
    facts = json.loads(FACTS.read_text())["facts"]

    assert {} == differences(facts)
    assert len(facts) > 200
    assert not {fact for fact in facts if fact not in ours()}


def test_every_mirror_is_in_the_committed_facts():
    """A structure that nobody compares may be wrong."""
    facts = json.loads(FACTS.read_text())["facts"]
    absent = {
        fact
        for fact in ours()
        if fact not in facts
        and fact.removeprefix("const ") not in NEWER_CONSTANTS
        and fact.partition(" ")[2].partition(".")[0] not in NEWER_STRUCTS
        and not any(
            fact == f"field {struct}.{field}"
            for struct, fields in NEWER_FIELDS.items()
            for field in fields
        )
    }

    assert set() == absent


def test_the_mirrors_agree_with_the_compiler_of_aarch64(tmp_path):
    """Nobody here has such a machine, and libfabric is what tep runs over there first."""
    require_cross("rdma/fabric.h")
    found = read(printed(tmp_path, program(()), skips=True))
    facts = {  # the compiler writes constants down with their sign
        fact: value & 2**64 - 1 if fact.startswith("const ") else value
        for fact, value in found.items()
    }

    assert {} == differences(facts)
    assert 200 < len(facts)


def test_the_mirrors_agree_with_the_installed_headers(tmp_path):
    """The compiler is the authority; the committed facts may be of another machine."""
    if shutil.which("cc") is None or not (INCLUDE / "rdma/fabric.h").exists():
        pytest.skip("no C compiler, or no libfabric headers (Debian: gcc, libfabric-dev)")
    facts, absent = compiled(tmp_path)
    known = (
        NEWER_CONSTANTS
        | NEWER_STRUCTS
        | {f"{struct}.{field}" for struct, fields in NEWER_FIELDS.items() for field in fields}
    )

    assert {} == differences(facts)
    unknown = {fact.partition(" ")[2] for fact in absent} - known
    assert set() == {name for name in unknown if name.partition(".")[0] not in NEWER_STRUCTS}


def test_the_dtype_is_the_structure():
    """Columns are written by C and read by numpy: offsets must be the same."""
    struct = C.fi_cq_data_entry
    assert ctypes.sizeof(struct) == CQ_DATA_ENTRY.itemsize
    for field, *_ in struct._fields_:
        where = getattr(struct, field)
        assert (where.offset, where.size) == (CQ_DATA_ENTRY.fields[field][1], 8), field


def test_the_descriptor_record_is_made_of_the_structures():
    """The data path lays iovec, fi_rma_iov and fi_msg_rma behind each other in one record."""
    from tep.backends.libfabric import slots

    fields = slots._RECORD.fields
    message = fields["p_iov"][1]
    for name, struct, field, base in (
        ("src", C.iovec, "iov_base", 0),
        ("src_len", C.iovec, "iov_len", 0),
        ("dst", ROWS.fi_rma_iov, "addr", 16),
        ("dst_len", ROWS.fi_rma_iov, "len", 16),
        ("rkey", ROWS.fi_rma_iov, "key", 16),
        ("p_iov", ROWS.fi_msg_rma, "msg_iov", message),
        ("p_desc", ROWS.fi_msg_rma, "desc", message),
        ("iov_count", ROWS.fi_msg_rma, "iov_count", message),
        ("peer", ROWS.fi_msg_rma, "addr", message),
        ("p_rma", ROWS.fi_msg_rma, "rma_iov", message),
        ("rma_count", ROWS.fi_msg_rma, "rma_iov_count", message),
        ("context", ROWS.fi_msg_rma, "context", message),
        ("data", ROWS.fi_msg_rma, "data", message),
    ):
        assert base + getattr(struct, field).offset == fields[name][1], name


def main():
    """Write the committed facts anew: python tests/abi/test_libfabric_abi.py"""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        facts, _ = compiled(Path(folder))
    text = (INCLUDE / "rdma/fabric.h").read_text()
    major = re.search(r"FI_MAJOR_VERSION (\d+)", text)[1]
    minor = re.search(r"FI_MINOR_VERSION (\d+)", text)[1]
    about = f"libfabric {major}.{minor} headers, by the C compiler, x86_64"
    FACTS.write_text(json.dumps({"about": about, "facts": facts}, indent=0) + "\n")


if __name__ == "__main__":
    main()
