#!/usr/bin/env bash
# Two vLLM servers on one GPU behind ServerPool, against `--engines 2` with a profile taken while both run: does the
# simulated cluster hold? Wanted: within 8 %.
#
#   benchmarks/two_servers.sh OUT          # one H200, about 4 minutes; BUDGET seconds (default: 300)
#
# Qwen2.5-1.5B's shape with random weights, 30 GB of KV cache for each server, 128 slots each, updates of 256, median
# 318 tokens, limit 2,048. Both servers are profiled as one pool, so that each has the other's load.
# Needs vLLM on PYTHONPATH. benchmarks/two_servers.py prints the table from OUT.
set -euo pipefail -f
mkdir -p "${1:?usage: two_servers.sh OUT}"
out=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_SERVER_DEV_MODE=1
model=benchmarks/shapes/qwen2.5-1.5b
ports=(30000 30001)
urls=(http://127.0.0.1:30000 http://127.0.0.1:30001)

trap 'kill $(jobs -p) 2>/dev/null' EXIT
for port in "${ports[@]}"; do
  python3 -m vllm.entrypoints.openai.api_server --model "$model" --load-format dummy --host 127.0.0.1 --port "$port" \
    --tokens-only --logprobs-mode processed_logprobs --max-num-seqs 128 --stream-interval 8 --max-model-len 2400 \
    --gpu-memory-utilization 0.4 --kv-cache-memory-bytes 30000000000 >"$out/server-$port.log" 2>&1 &
  sleep 5
done
until python3 -c "import urllib.request as u; [u.urlopen(url + '/health', timeout=2) for url in '${urls[*]}'.split()]" \
  2>/dev/null; do
  [ "$(jobs -pr | wc -l)" = 2 ] || { tail -n 40 "$out/server-30000.log" "$out/server-30001.log"; exit 1; }
  sleep 1
done
echo "servers ready after $SECONDS s"
python3 -m sortedrl profile --engine vllm-server --engine-urls "${urls[@]}" --model "$model" --slots 256 \
  --max-context-tokens 2400 --repeats 1 --out "$out/profile.json"
echo "profile after $SECONDS s"
for mode in baseline partial+elevator; do
  [ $SECONDS -lt "${BUDGET:-300}" ] || { echo "no time left for $mode"; continue; }
  python3 -m sortedrl bench --engine vllm-server --engine-urls "${urls[@]}" --model "$model" --slots 256 \
    --rollouts-per-update 256 --prompts-per-cohort 1024 --cohorts 3 --updates 5 --median-length 318 \
    --max-response-tokens 2048 --prompt-tokens 128 --seed 5 --modes "$mode" --out "$out/${mode//+/-}.json"
  echo "$mode after $SECONDS s"
done
python3 benchmarks/two_servers.py "$out"
