#!/usr/bin/env bash
# What drafts give on one H200 with vLLM, no network. Each part writes to OUT as it goes; run plain before eagle3.
#
#   benchmarks/drafts.sh PART OUT
#
# plain       250 s: rows without drafts, then updates end to end (the first of 3 is not counted)
# eagle3      390 s: rows with an EAGLE-3 head, the most valuable first, then the same updates with drafts at 2.0
# ngram_gpu   140 s: vLLM's drafter without weights
# exact        60 s: distribution and log-probabilities beside a head on vLLM's newer model runner; with pytest, a test
# acceptance  200 s: MODEL (runs/smollm2-search-small, as headline_pretrained.sh makes it) is trained with SuffixDrafter,
#             three seeds at once, three epochs of 3 updates; 30 GB, and other processes may share the GPU
# table             : what OUT holds
set -euo pipefail
part=${1:?usage: drafts.sh PART OUT}
mkdir -p "${2:?usage: drafts.sh PART OUT}"
out=$(realpath "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}
unset PYTHONDONTWRITEBYTECODE
shape=${SHAPE:-8b} planned=on-policy+planned@oracle elevator=partial+elevator@oracle:reuse

rows() { # of SECONDS, so many for the updates end to end, then the rows
  local limit=$1 last=$2
  shift 2
  # Not in all parts: micro-batches of many sizes would leave gaps in memory. A KV cache of 14 GiB never fills up here.
  PYTORCH_ALLOC_CONF=expandable_segments:True timeout $((limit + 40)) "${PYTHON:-python3}" benchmarks/drafts.py run \
    --out "$out" --shape "$shape" --scale 0.5 --kv-gib "${KV_GIB:-14}" --stop-after "$limit" \
    --end-to-end "${UPDATES:-3}" --end-to-end-seconds "$last" --rows "$@" 2>&1 | tee -a "$out/log.txt"
}

case $part in
  plain) rows "${LIMIT:-270}" 130 plain:{baseline,$planned,$elevator} ;;
  eagle3)
    rows "${LIMIT:-395}" 108 eagle3/always2.0:{baseline,$planned,$elevator} eagle3/never:baseline \
      eagle3/always1.5:{$planned,$elevator} eagle3/always2.5:{$planned,$elevator} eagle3/tail2.0/64:baseline \
      eagle3/never:$elevator eagle3/tail1.5/74:baseline eagle3/tail2.0/64:$planned eagle3/always2.0:baseline \
      eagle3/never:$planned
    ;;
  ngram_gpu) UPDATES=0 rows "${LIMIT:-160}" 0 ngram_gpu/always2.0:baseline ;;
  exact)
    export VLLM_USE_V2_MODEL_RUNNER=1 # an error where it cannot run, instead of the older one
    timeout 120 "${PYTHON:-python3}" benchmarks/draft_exactness.py 2>&1 | tee -a "$out/exact.txt" || true
    if "${PYTHON:-python3}" -c 'import pytest' 2>/dev/null; then
      timeout 120 "${PYTHON:-python3}" -m pytest -p no:cacheprovider tests/with_vllm/test_vllm_drafts.py \
        -k beside_a_draft_model 2>&1 | tail -30 | tee -a "$out/exact.txt"
    fi
    ;;
  acceptance)
    timeout "${LIMIT:-260}" "${PYTHON:-python3}" benchmarks/draft_acceptance.py --model "${MODEL:-runs/smollm2-search-small}" \
      --out "$out" --runs "${RUNS:-/tmp/draft-acceptance}" --updates 9 --stagger 5 >"$out/log.txt" 2>&1 || true
    ;;&
  acceptance | table)
    if compgen -G "$out/seed-*.jsonl" >/dev/null; then
      "${PYTHON:-python3}" benchmarks/draft_acceptance.py table --out "$out" | tee "$out/table.txt"
    else
      "${PYTHON:-python3}" benchmarks/drafts.py table --out "$out"
      "${PYTHON:-python3}" benchmarks/end_to_end_table.py "$out"/end_to_end-{plain,eagle3}/end_to_end.jsonl
    fi
    ;;
  *) echo "no such part: $part" >&2 && exit 2 ;;
esac
