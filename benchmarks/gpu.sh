#!/usr/bin/env bash
# Measures CPU staging on one CUDA GPU, in at most seven minutes:
#
#     bash benchmarks/gpu.sh FOLDER
#
# Runs the tests that need CUDA, then the bench with two replica processes on the one GPU, over Gloo: the RFC's
# sizes, half a gigabyte and two gigabytes. FOLDER gets the JSON files, plots and tables. PYTHON is the interpreter with the installed package (default: python).
set -uo pipefail
[ $# -eq 1 ] || { echo "usage: bash benchmarks/gpu.sh FOLDER" >&2; exit 2; }
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
# From here: it may be a path relative to this folder, and a link of a virtual environment.
python=$(realpath -s "$(command -v "${PYTHON:-python}")") || { echo "there is no ${PYTHON:-python}" >&2; exit 2; }
cd "$(dirname "$0")/.."
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} PYTHONPATH=benchmarks${PYTHONPATH:+:$PYTHONPATH}
"$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || {
  echo "${PYTHON:-python} sees no CUDA device; nothing was measured" >&2
  exit 2
}
failed=0

echo "== tests that need CUDA"
timeout --signal=INT --kill-after=10 80 "$python" -m pytest -q -rA tests/processes/test_memory_replicas.py \
  -k cuda 2>&1 | tee "$out/tests.txt" || failed=1

bench() {
  local name=$1 limit=$2
  shift 2
  echo "== $name"
  timeout --signal=INT --kill-after=10 "$limit" "$python" -m torchft.local_sgd_bench --device cuda \
    --json "$out/$name.json" "$@" | tee "$out/$name.txt" || failed=1
  # Of the file, so that a machine without matplotlib loses nothing but the plot.
  [ ! -f "$out/$name.json" ] \
    || "$python" -m torchft.local_sgd_bench --from-json "$out/$name.json" --plot "$out/$name.png" > /dev/null || true
}

bench gpu-rfc 100 --model rfc --window-mb 0 --window-mb 155 --allreduce-to-cpu
bench gpu-half 125 --model gpu_models:half_gigabyte --pairs 10 --window-mb 0 --window-mb 256 --allreduce-to-cpu
bench gpu-two 105 --model gpu_models:two_gigabytes --pairs 4 --window-mb 0 --allreduce-to-cpu

exit $failed
