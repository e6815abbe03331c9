#!/usr/bin/env bash
# Measures CPU staging on the CPUs of this machine, about six minutes on two cores with nothing else to do:
#
#     bash benchmarks/cpu.sh
#
# Writes benchmarks/cpu-*.json; `make -C docs figures` makes the tables and pictures of them. PYTHON is the interpreter
# with the installed package (default: python).
set -euo pipefail
# From here: it may be a path relative to this folder, and a link of a virtual environment.
python=$(realpath -s "$(command -v "${PYTHON:-python}")")
cd "$(dirname "$0")"

bench() {
  "$python" -m torchft.local_sgd_bench --device cpu --json "$@" > /dev/null
}

bench cpu-rfc.json --model rfc --pairs 30 --window-mb 0 --window-mb 155 --allreduce-to-cpu
bench cpu-many.json --model many --pairs 30 --window-mb 0 --window-mb 8 --allreduce-to-cpu
