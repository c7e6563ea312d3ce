# First commands on a host without NICs, from README.md, docs/howto/connectx.md and
# docs/howto/launch.md. What is "bad" here depends on the machine: then doctor ends with 1.
set -e
.venv/bin/tep info
.venv/bin/tep doctor || test $? = 1
scripts/cx7_smoke sim
scripts/bench_two_nodes --launch local --backend libfabric --option provider=tcp --short --json mine.json
.venv/bin/tep sim fit mine.json --out mine.toml
.venv/bin/python -c "import tep; print(tep.sim.transfer_time(2**26, ['mine.toml', 'cx7_400']))"
