"""Measure a weight update on this machine: schedule, prediction, quantisation. Run it as a script.

python tests/bench/bench_rl.py [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time

import numpy as np

from tep.apps.rl import study
from tep.apps.rl.compute import numpy_dtype, quantise
from tep.apps.rl.models import PUBLISHED, load_model
from tep.apps.rl.predict import TOTAL_MS


def cpu(function, times=1):
    """Median CPU seconds of a call, and its last result."""
    found = []
    for _ in range(times):
        start_s = time.process_time()
        result = function()
        found.append(time.process_time() - start_s)
    return statistics.median(found), result


def main(argv):
    """Print one table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args(argv).json
    rows = {}
    values = np.random.default_rng(1).standard_normal((2048, 2048), np.float32)
    values = values.astype(numpy_dtype("bf16"))
    seconds, _ = cpu(lambda: quantise(values), 5)
    rows["quantise bf16 -> fp8, MB/s"] = round(values.nbytes / seconds / 1e6, 1)
    for name in PUBLISHED:
        deployment = study.Deployment(
            model=load_model(name), train=study.train_layout(256), infer=study.infer_layout(128)
        )
        seconds, schedule = cpu(deployment.schedule)
        rows[f"{name}: schedule, CPU s"] = round(seconds, 2)
        study.published_times()
        seconds, found = cpu(lambda d=deployment, s=schedule: d.predict(s))
        rows[f"{name}: prediction, CPU s"] = round(seconds, 2)
        rows[f"{name}: predicted total, ms"] = round(found.total_ms, 1)
    rows["kimi-k2: published total, ms"] = TOTAL_MS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows["peak memory, MiB"] = round(peak / 1024)
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        for what, value in rows.items():
            sys.stdout.write(f"{what:<40}{value:>12}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
