"""The first commands on an instance, on the fake EFA device and beside Soft-RoCE."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_efa import fabric
from tests.support.here import need_fake_efa, need_guest
from tests.support.vm.guest import Options, run_in_guest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
DOCTOR = "import sys; from tep.cli import main; sys.exit(main(['doctor', '--json']))"


def by_area(text):
    return {one["area"]: one for one in json.loads(text)["findings"]}


def test_the_doctor_on_fake_efa_nics():
    """On an instance this is the first command; it must see the NICs and use them."""
    need_fake_efa()
    with fabric({"nics": 2, "seed": 3}) as run:
        done = subprocess.run(
            [sys.executable, "-c", DOCTOR],
            env=os.environ | run.environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        landed = run.total()["imms_landed"]
    found = by_area(done.stdout)

    mine = found["backend libfabric efa"]
    assert "ok" == mine["level"] or "no hw_counters" in mine["text"], mine
    assert landed >= 2 * 64, "the NICs were not used"
    assert "4: ACTIVE, 100 Gb/sec" in found["rdmap79s0"]["text"]


EFA = {
    # setting of the fake device: (level, words of the finding, words of the remedy)
    "all": (31, {
        "RDMA write, rows to 1 GiB": ("ok", ""),
        "RDMA read, to 1 GiB": ("ok", ""),
        "firmware 0.0.0.fake; messages to 8928 B on port 1; registrations to 1 TiB": ("ok", ""),
    }),
    "none": (0, {
        "no RDMA write": ("bad", "instance type"),
        "no RDMA read": ("note", "nothing for writes"),
        "no retry after RNR": ("warning", "newer efa driver"),
    }),
}  # fmt: skip


@pytest.mark.parametrize("which", EFA)
def test_what_efa_nics_can_do_is_asked_of_their_library(which):
    """p4d has EFA and cannot write; that a transfer crawls there must be known before it does."""
    need_fake_efa()
    caps, expected = EFA[which]
    ask = (
        "import json; from tep.host.doctor.devices import check_devices; "
        "print(json.dumps([one.to_json() for one in check_devices()]))"
    )
    with fabric({"nics": 2, "caps": caps}) as run:
        done = subprocess.run(
            [sys.executable, "-c", ask],
            env=os.environ | run.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    found = [one for one in json.loads(done.stdout) if one["area"] == "device rdmap80s0"]

    for words, (level, remedy) in expected.items():
        (one,) = (one for one in found if one["text"].startswith(words))
        assert level == one["level"]
        assert remedy in one["remedy"]
        assert one["remedy"] or level == "ok"


@pytest.mark.long  # the emulated processor takes a minute for each
@pytest.mark.timeout(700)
def test_the_commands_for_connectx_beside_soft_roce():
    """The smoke test and the benchmark of two nodes, over real libibverbs. Doctor: tests/verbs."""
    need_guest()
    python = shlex.quote(sys.executable)
    bench = "scripts/bench_two_nodes.py --short --launch local --backend verbs --option nics=2"
    commands = [f"cd {shlex.quote(str(ROOT))}", f"{python} scripts/verify_efa.py verbs"]
    commands += [f"{python} {bench}"]
    ran = run_in_guest(["sh", "-c", " && ".join(commands)], Options(nics=2, timeout_s=600))

    assert "verbs: all checks held" in ran.output, ran.output[-3000:]
    assert "bidirectional 1048576" in ran.output, ran.output[-3000:]
