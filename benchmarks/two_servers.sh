#!/usr/bin/env bash
# Two vLLM servers on one GPU behind ServerPool, against `--engines 2` with a profile taken while both run: does the
# simulated cluster hold? Wanted: within 8 %.
#
#   benchmarks/two_servers.sh OUT          # one H200, about 4 minutes; BUDGET seconds (default: 250)
#
# Qwen2.5-1.5B's shape with random weights, 30 GB of KV cache for each server, 128 slots each, updates of 256, median
# 318 tokens, limit 2,048. Needs vLLM on PYTHONPATH. benchmarks/two_servers.py says what is measured and predicted, and
# prints the table from OUT. On a CPU: SHAPE=tiny SLOTS=8 MEDIAN=40 LIMIT=160 UPDATES=3
# SERVER="--enforce-eager --dtype float32".
set -euo pipefail -f
mkdir -p "${1:?usage: two_servers.sh OUT}/metrics"
out=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_SERVER_DEV_MODE=1
model=benchmarks/shapes/${SHAPE:-qwen2.5-1.5b}
slots=${SLOTS:-128} limit=${LIMIT:-2048} prompt=128 at_once=8192
longest=$((prompt + limit + 224))
ports=("${PORT:-30000}" $((${PORT:-30000} + 1)))
urls=("${ports[@]/#/http://127.0.0.1:}")

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT # what comes next needs their memory
for port in "${ports[@]}"; do
  python3 -m vllm.entrypoints.openai.api_server --model "$model" --load-format dummy --host 127.0.0.1 --port "$port" \
    --tokens-only --logprobs-mode processed_logprobs --max-num-seqs "$slots" --stream-interval 8 \
    --max-model-len $longest --max-num-batched-tokens $at_once \
    --gpu-memory-utilization 0.4 ${SERVER:---kv-cache-memory-bytes 30000000000} >"$out/server-$port.log" 2>&1 &
  sleep 5
done
until python3 -c "import urllib.request as u; [u.urlopen(url + '/health', timeout=2) for url in '${urls[*]}'.split()]" \
  2>/dev/null; do
  [ "$(jobs -pr | wc -l)" = 2 ] || { tail -n 40 "$out/server-${ports[0]}.log" "$out/server-${ports[1]}.log"; exit 1; }
  sleep 1
done

save_metrics() { # of both servers
  for port in "${ports[@]}"; do
    python3 -c "import urllib.request as u; print(u.urlopen('http://127.0.0.1:$port/metrics').read().decode())" |
      grep -E '^vllm:.*(_total|_sum|_count|iteration_tokens_total_bucket)\{' >"$out/metrics/$1-$port.txt" || true
  done
}

echo "servers ready after $SECONDS s"
python3 benchmarks/two_servers.py profile "$out" --urls "${urls[@]}" --model "$model" --slots "$slots" \
  --longest $((longest * 2 / 3)) --tokens-per-step $at_once
echo "profile after $SECONDS s"
modes=(partial+elevator baseline)
work=(--slots $((2 * slots)) --rollouts-per-update $((2 * slots)) --prompts-per-cohort $((8 * slots)) --cohorts 3
  --updates "${UPDATES:-5}" --median-length "${MEDIAN:-318}" --max-response-tokens "$limit" --prompt-tokens $prompt --seed 5)
python3 benchmarks/two_servers.py predict "$out" --modes "${modes[@]}" "${work[@]}" | tee "$out/predicted.txt"
for mode in "${modes[@]}"; do
  [ $SECONDS -lt $((${BUDGET:-250} - 60)) ] || { echo "no time left for $mode"; continue; }
  name=${mode//+/-}
  save_metrics "$name-before"
  python3 -m sortedrl bench --engine vllm-server --engine-urls "${urls[@]}" --model "$model" "${work[@]}" --modes "$mode" \
    --events "$out/events" --out "$out/$name.json"
  save_metrics "$name-after"
  echo "$mode after $SECONDS s"
done
python3 benchmarks/two_servers.py table "$out" | tee "$out/table.txt"
