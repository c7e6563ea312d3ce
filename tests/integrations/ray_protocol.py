"""A protocol for ray_search.py, wrong on purpose; and a module beside it that travels with it."""

from __future__ import annotations

import ray_protocol_size

import tep


async def believes_in_its_nics(cluster):
    """Write once; say that it never fails, which is wrong in some cases."""
    a, b = cluster.engines[:2]
    nbytes = ray_protocol_size.NBYTES
    source, _ = a.reg_mr(bytes(nbytes), access=tep.Access.SOURCE)
    _, target = b.reg_mr(bytearray(nbytes))
    for imm in range(1, 5):
        try:
            await a.submit_single_write(nbytes, (source, 0), (target, 0), imm=imm)
        except tep.TepError as error:
            raise AssertionError(f"write {imm} failed") from error
