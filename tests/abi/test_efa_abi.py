"""The mirrors of libefa's structs, and of the entries that an EFA device reads and writes.

Structs of <infiniband/verbs.h> and <infiniband/efadv.h> are compared with the compiler's, as far as
the installed header has them. What came later, and the entries, stand in efa.facts beside this
file: written by `main` from rdma-core's sources (`python tests/abi/test_efa_abi.py SOURCES`).
"""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

import pytest

from tep.backends.efa import ways
from tep.backends.ffi.efa import SESSION_OFFSETS, Dv
from tests.abi.test_ibverbs_abi import compiled_facts, differences, parse
from tests.support.cross import printed, require_cross

VERBS_STRUCTS = {"ibv_cq_init_attr_ex": Dv.ibv_cq_init_attr_ex}
EFA_STRUCTS = {name: it for name, it in vars(Dv).items() if name not in VERBS_STRUCTS}
FACTS = Path(__file__).with_name("efa.facts")
HEADER = Path("/usr/include/infiniband/efadv.h")
LATER = {"efadv_wq_attr", "efadv_cq_attr"}  # not in every installed header
RENAMED = {  # what an older header calls a place that was given a use later
    ("efadv_device_attr", "inline_buf_size_ex"),
    ("efadv_qp_init_attr", "flags"),
    ("efadv_qp_init_attr", "sl"),
    ("efadv_qp_init_attr", "reserved"),
    ("efadv_cq_init_attr", "comp_mask"),
}
# Where C keeps what our dtypes name, by the struct and the way to the member.
ENTRIES = {
    "efa_io_tx_wqe": (
        ways.TX_ENTRY,
        {
            "req_id": "meta.req_id",
            "ctrl1": "meta.ctrl1",
            "ctrl2": "meta.ctrl2",
            "dest_qp": "meta.dest_qp_num",
            "length": "meta.length",
            "imm": "meta.immediate_data",
            "ah": "meta.ah",
            "qkey": "meta.qkey",
            "remote_length": "data.rdma_req.remote_mem.length",
            "rkey": "data.rdma_req.remote_mem.rkey",
            "remote_addr": "data.rdma_req.remote_mem.buf_addr_lo",
            "local_length": "data.rdma_req.local_mem[0].length",
            "lkey": "data.rdma_req.local_mem[0].lkey",
            "local_addr": "data.rdma_req.local_mem[0].buf_addr_lo",
            "send_length": "data.sgl[0].length",
            "send_lkey": "data.sgl[0].lkey",
            "send_addr": "data.sgl[0].buf_addr_lo",
        },
    ),
    "efa_io_rx_desc": (
        ways.RX_ENTRY,
        {
            "addr": "buf_addr_lo",
            "req_id": "req_id",
            "length": "length",
            "lkey_ctrl": "lkey_ctrl",
        },
    ),
    "efa_io_rx_cdesc": (
        ways.COMPLETION_ENTRY,
        {
            "req_id": "common.req_id",
            "status": "common.status",
            "flags": "common.flags",
            "qp": "common.qp_num",
            "length": "length",
            "ah": "ah",
            "src_qp": "src_qp_num",
            "imm": "imm",
        },
    ),
}
VALUES = {
    "EFA_IO_SEND": ways.OP_SEND,
    "EFA_IO_RDMA_WRITE": ways.OP_WRITE,
    "EFA_IO_TX_META_DESC_HAS_IMM_MASK": ways.HAS_IMM,
    "EFA_IO_TX_META_DESC_META_DESC_MASK": ways.ALWAYS_1,
    "EFA_IO_TX_BUF_DESC_LKEY_MASK": ways.LKEY_MASK,
    "EFA_IO_CDESC_COMMON_PHASE_MASK": 1,
    "EFA_IO_CDESC_COMMON_Q_TYPE_MASK": 6,
    "EFA_IO_CDESC_COMMON_HAS_IMM_MASK": ways.HAS_IMM >> 1,
    "EFA_IO_REGS_CQ_DB_ARM_MASK": ways.ARM,
}


def mirrored():
    """Return the facts of our mirrors."""
    found = {}
    for name, mirror in (VERBS_STRUCTS | EFA_STRUCTS).items():
        for field, _ in mirror._fields_:
            place = getattr(mirror, field)
            found[f"field {name} {field}"] = (place.offset, place.size)
    for name, (dtype, members) in ENTRIES.items():
        assert set(dtype.names) == set(members)
        found[f"size {name}"] = (dtype.itemsize,)
        for field in members:
            found[f"at {name} {field}"] = (dtype.fields[field][1],)
    found.update((f"value {name}", (value,)) for name, value in VALUES.items())
    return found


def members(structs, but=()):
    """Lines of C that print where the members of structs are."""
    return [
        f'printf("field {name} {field} %zu %zu\\n", offsetof(struct {name}, {field}), '
        f"sizeof(((struct {name} *)0)->{field}));"
        for name, mirror in structs.items()
        for field, _ in mirror._fields_
        if (name, field) not in but
    ]


def program(lines, *headers):
    """A program that prints facts."""
    head = ["#include <stdio.h>", "#include <stddef.h>", *(f"#include {one}" for one in headers)]
    return "\n".join([*head, "int main(void) {", *lines, "return 0; }"])


def test_mirrors_agree_with_the_installed_headers(tmp_path):
    """A call taken from the wrong place of the table of a queue pair is a crash."""
    if shutil.which("gcc") is None or not HEADER.exists():
        pytest.skip("no gcc or no <infiniband/efadv.h>; apt install gcc libibverbs-dev")
    found = compiled_facts(tmp_path, installed())

    mine = mirrored() | sessions(platform.machine())
    assert [] == differences(found, {name: mine[name] for name in found})
    assert 20 < len(found)


def test_mirrors_agree_with_the_compiler_of_aarch64(tmp_path):
    """The table of calls stands behind a mutex, which is longer there by 8 bytes."""
    require_cross("infiniband/efadv.h")
    found = parse(printed(tmp_path, installed()))
    mine = mirrored() | sessions("aarch64")

    assert [] == differences(found, {name: mine[name] for name in found})
    assert 20 < len(found)


def sessions(machine):
    """The facts about the two calls that a fence is made of."""
    names = ("wr_start", "wr_abort")
    return {f"call {name}": (at,) for name, at in zip(names, SESSION_OFFSETS[machine], strict=True)}


def installed():
    """The program that asks the installed headers."""
    known = {name: mirror for name, mirror in EFA_STRUCTS.items() if name not in LATER}
    lines = members(VERBS_STRUCTS) + members(known, RENAMED)
    lines += [
        f'printf("call {name} %zu\\n", offsetof(struct ibv_qp_ex, {name}));'
        for name in ("wr_start", "wr_abort")
    ]
    return program(lines, "<infiniband/verbs.h>", "<infiniband/efadv.h>")


def test_mirrors_agree_with_the_facts():
    """An entry with a field at another place is executed all the same, with other bytes."""
    facts = parse(FACTS.read_text())

    assert [] == differences(facts, {name: mirrored()[name] for name in facts})
    assert {name for name in mirrored() if name.split()[1] not in VERBS_STRUCTS} == set(facts)


def main(sources):
    """Write the facts down anew from rdma-core's sources."""
    import tempfile

    lines = members(EFA_STRUCTS)
    for name, (_, fields) in ENTRIES.items():
        lines.append(f'printf("size {name} %zu\\n", sizeof(struct {name}));')
        for field, way in fields.items():
            lines.append(f'printf("at {name} {field} %zu\\n", offsetof(struct {name}, {way}));')
    lines += [f'printf("value {name} %llu\\n", (unsigned long long)({name}));' for name in VALUES]
    headers = [
        f'"{Path(sources).resolve()}/providers/efa/{name}.h"'
        for name in ("efadv", "efa_io_defs", "efa_io_regs_defs")
    ]
    defines = "#define BIT(n) (1u << (n))\n#define GENMASK(h, l) ((2u << (h)) - (1u << (l)))\n"
    with tempfile.TemporaryDirectory() as folder:
        text = defines + program(
            lines, "<stdint.h>", "<stdbool.h>", "<infiniband/verbs.h>", *headers
        )
        found = compiled_facts(Path(folder), text)
    facts = (" ".join([name, *map(str, values)]) for name, values in found.items())
    FACTS.write_text("".join(f"{line}\n" for line in facts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
