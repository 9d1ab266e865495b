#!/usr/bin/env bash
# The same forced lengths on one GPU through three engines: what does the HTTP path cost? benchmarks/LOG.md, sections 9
# and 12.
#
#   benchmarks/servers_8b.sh sglang|vllm-server|vllm OUT
#
# LLaMA-3.1-8B's shape with random weights, 128 slots, updates of 128, median 637 tokens, limit 4,096, seed 5. First a
# profile (OUT/ENGINE-profile.json), then every mode with the prediction from it (OUT/ENGINE-MODE.json), so a time limit
# costs the last modes alone. MODES="mode:updates ..." selects; PROFILE=FILE skips the profile; BACKEND names SGLang's
# attention (default: fa3). BUDGET seconds (default: 540): no mode starts later. Needs the engine on PYTHONPATH.
# MEDIAN and LIMIT: other lengths. CONTEXT: the profile's longest. KV_GIB: vLLM's KV cache, 8,192 tokens per GiB.
# URL: a server that runs already. ENGINE_OPTIONS="reuse_kv_cache True", for example.
set -euo pipefail -f
engine=${1:?usage: servers_8b.sh sglang|vllm-server|vllm OUT}
mkdir -p "${2:?usage: servers_8b.sh ENGINE OUT}"
out=$(realpath "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE
model=${MODEL:-benchmarks/shapes/llama-3.1-8b}
port=30000
url=${URL:-http://127.0.0.1:$port}
default="baseline:4 partial+elevator@oracle:6 partial+elevator@cold:6"
[ "$engine" = sglang ] && default="baseline:4 partial+elevator@oracle:6 partial:5 partial+elevator@cold:6 april:6 on-policy:4 cohort-at-once+longest-first@oracle:4"

case $engine in
  sglang)
    server=(python3 -m sglang.launch_server --host 127.0.0.1 --model-path "$model" --load-format dummy --skip-tokenizer-init
      --port $port --attention-backend "${BACKEND:-fa3}" --sampling-backend pytorch
      --max-running-requests 128 --incremental-streaming-output --mem-fraction-static 0.7)
    flags=(--engine sglang --engine-urls "$url" ${ENGINE_OPTIONS:+--engine-options $ENGINE_OPTIONS})
    ;;
  vllm-server)
    export VLLM_SERVER_DEV_MODE=1
    server=(python3 -m vllm.entrypoints.openai.api_server --model "$model" --load-format dummy --host 127.0.0.1 --port $port
      --tokens-only --logprobs-mode processed_logprobs --max-num-seqs 128 --stream-interval 8 --max-model-len 4400
      --gpu-memory-utilization 0.7 ${KV_GIB:+--kv-cache-memory-bytes $((KV_GIB << 30))})
    flags=(--engine vllm-server --engine-urls "$url" ${ENGINE_OPTIONS:+--engine-options $ENGINE_OPTIONS})
    ;;
  vllm)
    server=()
    flags=(--engine vllm --engine-options load_format dummy gpu_memory_utilization 0.7
      ${KV_GIB:+kv_cache_memory_bytes $((KV_GIB << 30))} ${ENGINE_OPTIONS:-})
    ;;
esac

if [ ${#server[@]} -gt 0 ] && [ -z "${URL:-}" ]; then
  setsid "${server[@]}" >"$out/$engine-server.log" 2>&1 &
  pid=$!
  trap 'set +e; kill -KILL -- -$pid 2>/dev/null; wait $pid 2>/dev/null; tail -c 20000 "$out/$engine-server.log" >"$out/$engine-server.txt"; rm -f "$out/$engine-server.log"' EXIT
  until python3 -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health', timeout=2)" 2>/dev/null; do
    kill -0 $pid || { tail -40 "$out/$engine-server.log"; exit 1; }
    sleep 2
  done
  echo "server ready after $SECONDS s"
fi
if [ -z "${PROFILE:-}" ]; then
  python3 -m sortedrl profile --model "$model" "${flags[@]}" --slots 128 --max-context-tokens "${CONTEXT:-4400}" --repeats 1 \
    --out "$out/$engine-profile.json"
  echo "profile after $SECONDS s"
fi
for entry in ${MODES:-$default}; do
  mode=${entry%:*}
  [ $SECONDS -lt "${BUDGET:-540}" ] || { echo "no time left for $mode"; continue; }
  python3 -m sortedrl bench --model "$model" "${flags[@]}" --step-time "${PROFILE:-$out/$engine-profile.json}" --slots 128 \
    --rollouts-per-update 128 --prompts-per-cohort 512 --cohorts 4 --updates "${entry##*:}" --median-length "${MEDIAN:-636.85}" \
    --max-response-tokens "${LIMIT:-4096}" --prompt-tokens 128 --seed 5 --modes "$mode" --out "$out/$engine-${mode//[+@]/-}.json"
  echo "$mode after $SECONDS s"
done
