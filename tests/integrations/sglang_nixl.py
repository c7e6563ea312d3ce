"""SGLang's own NIXL classes on tep: managers, senders, receivers, bootstrap server; no model.

    TEP_SGLANG=1 python tests/integrations/sglang_nixl.py prefill 8998     # until it is killed
    TEP_SGLANG=1 python tests/integrations/sglang_nixl.py decode 8998

Needs SGLang, if without its kernels, which exist for GPUs only. Its disaggregation modules are the
real ones and unchanged; what they import of kernels and images is stood in for by empty modules.
The two processes call sender and receiver as SGLang's queues do, and compare the pages byte for
byte. Without arguments, as scripts/integrations.py runs it, the program takes the commands from
docs/howto/sglang.md, and kills the prefill process in the end.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PAGES, PAGE_BYTES, LAYERS, AUX_BYTES, WAIT_S = 64, 4096, 3, 256, 90.0
ROOMS = 20  # requests that are sent; one more is not
START_S = 600.0  # to import SGLang, on a busy machine
MISSING = {"torchvision", "sgl_kernel", "flashinfer", "gguf"}


class Stand(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules for packages that are kernels, or belong to them."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: mock.MagicMock(name=name)
        return module

    def exec_module(self, module):
        pass


def rooms(*names: str):
    """Import modules of SGLang."""
    sys.meta_path.insert(0, Stand())
    import transformers.utils.import_utils as known

    known.is_torchvision_available = lambda: False
    known._torchvision_available = False
    return [importlib.import_module(f"sglang.srt.{name}") for name in names]


def load():
    """SGLang's NIXL room, with tep in NIXL's place."""
    (plugins,) = rooms("plugins")
    plugins.load_plugins()  # as each of SGLang's processes does
    import nixl._api

    common, conn = rooms("disaggregation.common.conn", "disaggregation.nixl.conn")
    assert nixl._api.__name__ == "tep.compat.nixl.api", "set TEP_SGLANG=1"
    return common, conn


class Rank:
    """One rank of one role: its cache, and a manager over it."""

    def __init__(self, role: str, port: int) -> None:
        common, conn = load()
        self.common, self.conn, self.addr = common, conn, f"127.0.0.1:{port}"
        parallel = SimpleNamespace(
            dist_init_addr=None, attn_tp_size=1, attn_tp_rank=0, attn_cp_size=1, attn_cp_rank=0,
            attn_dcp_size=1, attn_dcp_rank=0, attn_dp_size=1, attn_dp_rank=0, dp_size=1, pp_size=1,
            nnodes=1, num_dp_ranks=1, pp_group=None, load_balance_method="round_robin",
            enable_kv_cache_sharding=False, enable_dsa_cache_layer_split=False,
            enable_cp_tp_group_sharing=False,
        )  # fmt: skip
        for room in (common, conn):
            room.get_parallel = lambda: parallel
            room.get_serving = lambda: SimpleNamespace(host="127.0.0.1", port=1)
            room.get_device = lambda: SimpleNamespace(device="cpu")
            room.get_disagg = lambda: SimpleNamespace(
                disaggregation_bootstrap_port=port, disaggregation_decode_allocation_policy="early"
            )
        common.linear_attn_tp_size = lambda: 1
        common.get_local_ip_auto = lambda: "127.0.0.1"
        if role == "prefill":
            self.server = conn.NixlKVBootstrapServer("127.0.0.1", port)
        self.cache = [np.zeros((PAGES, PAGE_BYTES), np.uint8) for _ in range(2 * LAYERS)]
        self.aux = np.zeros((8, AUX_BYTES), np.uint8)
        args = common.KVArgs()
        args.engine_rank = args.gpu_id = args.system_dp_rank = args.pp_rank = 0
        args.kv_data_ptrs = [one.ctypes.data for one in self.cache]
        args.kv_data_lens = [one.nbytes for one in self.cache]
        args.kv_item_lens = [PAGE_BYTES for _ in self.cache]
        args.kv_data_mem_kinds = ["DRAM" for _ in self.cache]
        args.kv_layer_ids = [*range(LAYERS), *range(LAYERS)]
        args.kv_cache_dtype_str, args.page_size, args.ib_device = "uint8", 1, ""
        args.aux_data_ptrs, args.aux_data_lens = [self.aux.ctypes.data], [self.aux.nbytes]
        args.aux_item_lens = [AUX_BYTES]
        for name in ("types", "data_ptrs", "data_lens", "item_lens", "layer_ids", "dim_per_tensor",
                     "slice_outer_counts", "conv_shard_groups"):  # fmt: skip
            setattr(args, f"state_{name}", [])
        args.kv_head_num = args.total_kv_head_num = 1
        args.prefill_start_layer, args.prefill_end_layer = 0, LAYERS
        args.mla_compression_ratios = args.swa_kv_cache_layout = args.rust_http_port = None
        args.is_hybrid_mla_backend = False
        mode = common.DisaggregationMode(role)
        self.manager = conn.NixlKVManager(args, mode, SimpleNamespace(), False)

    def until(self, handle, *states: int) -> int:
        """Poll as SGLang's queues do."""
        end_s = time.monotonic() + WAIT_S
        while (state := int(handle.poll())) not in states:
            assert time.monotonic() < end_s, f"{handle} is in state {state}"
            threading.Event().wait(0.002)
        return state


def drawn(room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pages of a request at either side, and what its KV is."""
    dice = np.random.default_rng(room)
    count = int(dice.integers(1, 20))
    src, dst = (dice.permutation(PAGES)[:count].astype(np.int32) for _ in range(2))
    return src, dst, dice.integers(0, 256, (2 * LAYERS, count, PAGE_BYTES), dtype=np.uint8)


def prefill(port: int) -> None:
    """Send the pages of all rooms but the last."""
    rank = Rank("prefill", port)
    for room in range(ROOMS):
        src, _, kv = drawn(room)
        for layer, pages in zip(rank.cache, kv):
            layer[src] = pages
        rank.aux[room % 8] = room % 251
        sender = rank.conn.NixlKVSender(rank.manager, rank.addr, room)
        rank.until(sender, 2)
        sender.init(len(src), room % 8)
        for chunk in np.array_split(src, 1 if len(src) == 1 else 2):
            sender.send(chunk)
        assert rank.until(sender, 0, 4) == 4, f"request {room} was not sent"
        sender.clear()
    threading.Event().wait()  # for who kills it


def decode(port: int) -> None:
    """Receive the rooms, compare, and wait for the last one, which nobody sends."""
    rank = Rank("decode", port)
    end_s = time.monotonic() + START_S
    while not rank.manager.try_ensure_parallel_info(rank.addr):
        assert time.monotonic() < end_s, "no prefill process"
        threading.Event().wait(0.5)
    for room in range(ROOMS):
        _, dst, kv = drawn(room)
        for layer in rank.cache:
            layer[...] = 255
        receiver = rank.conn.NixlKVReceiver(rank.manager, rank.addr, room)
        receiver.init(0)
        rank.until(receiver, 2)
        receiver.send_metadata(dst, room % 8)
        assert rank.until(receiver, 0, 4) == 4, f"request {room} failed"
        for layer, pages in zip(rank.cache, kv):
            assert np.array_equal(layer[dst], pages), f"request {room}: other bytes"
            rest = np.setdiff1d(np.arange(PAGES), dst)
            assert (layer[rest] == 255).all(), f"request {room}: written beside its pages"
        assert (rank.aux[room % 8] == room % 251).all()
        receiver.clear()
    say(f"{ROOMS} requests, all pages equal; the next one waits until you kill the prefill process")
    receiver = rank.conn.NixlKVReceiver(rank.manager, rank.addr, ROOMS)
    receiver.init(0)
    rank.until(receiver, 2)
    assert rank.until(receiver, 0) == 0
    say("the request has failed: its prefill process is dead")


def say(text: str) -> None:
    """Print a line for the user, or for the program that looks on."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def commands(port: int) -> str:
    """Return the how-to's commands, with this port in place of its own."""
    page = (ROOT / "docs" / "howto" / "sglang.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert "8998" in block
    return block.replace("8998", str(port)).replace("tests/", f"{ROOT}/tests/")


def kill_prefill(port: int) -> None:
    """Kill the prefill process at a port."""
    import psutil

    for one in psutil.process_iter(["cmdline"]):
        if [*(one.info["cmdline"] or ())][-2:] == ["prefill", str(port)]:
            one.kill()


def look_on() -> None:
    """Run the how-to's commands, and kill the prefill process when the pages were compared."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = subprocess.Popen(
        ["/bin/bash", "-euc", commands(port)],
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    timer = threading.Timer(START_S, os.killpg, (shell.pid, 9))
    timer.start()
    try:
        said = []
        for line in shell.stdout:
            said.append(line.strip())
            if "all pages equal" in line:
                kill_prefill(port)
            elif "has failed" in line:
                break
        assert len(said) == 2, said
    finally:
        timer.cancel()
        os.killpg(shell.pid, 9)
        shell.wait()
    result = {"ok": True, "how-to": "ran", "requests": f"{ROOMS}, pages equal"}
    say(json.dumps(result | {"a killed prefiller": "Failed"}))


def main(argv: list[str]) -> int:
    """Be one of the two, or look on."""
    if argv:
        role, port = argv
        {"prefill": prefill, "decode": decode}[role](int(port))
    else:
        look_on()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
