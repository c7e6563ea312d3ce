# First commands on an instance with EFA, from docs/howto/efa.md and docs/howto/questions.md; the
# device is a fake one. Memory limits of a container may be "bad": then doctor ends with 1.
set -e
scripts/fake_efa .venv/bin/tep doctor || test $? = 1
scripts/fake_efa .venv/bin/tep info --topology
scripts/fake_efa scripts/verify_efa
scripts/fake_efa scripts/bench_two_nodes --launch local --backend libfabric --option provider=efa --short --json mine.json
.venv/bin/tep sim fit mine.json --base efa_2x200 --out mine.toml
.venv/bin/python -c "import tep; print(tep.sim.transfer_time(2**26, ['mine.toml', 'efa_2x200']))"
