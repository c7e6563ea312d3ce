"""The doctor over real libibverbs beside Soft-RoCE: what it finds, and that it used the NICs."""

from __future__ import annotations

import json

import pytest

from tep.cli import main


@pytest.mark.long  # a sixth of the guest's time; its rules are tested on captured trees
def test_the_doctor_beside_soft_roce(soft_devices, capsys):
    """On a machine with ConnectX NICs this is the first command; the counters tell of its bytes."""
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    first = soft_devices[0]
    verbs = [one["text"] for one in findings if one["area"] == "backend verbs"]
    asked = [one["text"] for one in findings if one["area"] == f"device {first}"]

    assert any("write to count" in one for one in verbs), verbs
    assert any("bytes went through the NICs" in one and "sent_pkts" in one for one in verbs), verbs
    assert any("messages to 8 MiB on port 1" in one for one in asked), asked
    assert any("and 128 reads at a time" in one for one in asked), asked
    assert any(one["area"] == first and "RoCE v2" in one["text"] for one in findings)
