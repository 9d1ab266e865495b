#!/usr/bin/env bash
# The same forced lengths on one GPU through three engines: what does the HTTP path cost? benchmarks/LOG.md, sections 9
# and 12.
#
#   benchmarks/servers_8b.sh ENGINES OUT                ENGINES: sglang, vllm-server, vllm, or several: "sglang vllm-server"
#
# LLaMA-3.1-8B's shape with random weights, 128 slots, updates of 128, median 637 tokens, limit 4,096, seed 5. Several
# servers start at once, stay, and take turns, so that a slower hour is the same for all. First a profile of each
# (OUT/ENGINE-profile.json), then every mode with the prediction from it (OUT/ENGINE-MODE.json; the next run of the
# same mode OUT/ENGINE-MODE-2.json), so a time limit costs the last modes alone. MODES="mode:updates ..." selects,
# "ENGINE/mode:updates" for one engine; PROFILE=FILE skips the profiles, PROFILED="sglang" those of other engines, which
# are then predicted by the preset h200-8b; BACKEND names SGLang's attention (default: fa3).
# BUDGET seconds (default: 540): no mode starts later. MEDIAN and LIMIT: other lengths. CONTEXT: the profile's longest.
# KV_GIB: KV cache of each engine, 8,192 tokens per GiB (several servers: 36). ENGINE_OPTIONS="reuse_kv_cache True", for
# example. Needs the engines on PYTHONPATH; SGLANG_SITE and VLLM_SITE are folders for one server alone, SGLANG_FLAGS and
# VLLM_FLAGS are added to its command.
set -euo pipefail -f
read -ra engines <<<"${1:?usage: servers_8b.sh ENGINES OUT}"
mkdir -p "${2:?usage: servers_8b.sh ENGINES OUT}"
out=$(realpath "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_SERVER_DEV_MODE=1
unset PYTHONDONTWRITEBYTECODE
model=${MODEL:-benchmarks/shapes/llama-3.1-8b}
slots=${SLOTS:-128}
declare -A ports=([sglang]=30000 [vllm-server]=30001)
declare -A pids
default="baseline:4 partial+elevator@oracle:6 partial+elevator@cold:6"
[ "${engines[*]}" = sglang ] && default="baseline:4 partial+elevator@oracle:6 partial:5 partial+elevator@cold:6 april:6 on-policy:4 cohort-at-once+longest-first@oracle:4"
[ ${#engines[@]} -gt 1 ] && KV_GIB=${KV_GIB:-36}
utilization=0.7 # of vLLM: with a KV cache of fixed size only what must be free
[ -n "${KV_GIB:-}" ] && utilization=0.3

start() { # the server of an engine
  case $1 in
    sglang)
      local kv="--mem-fraction-static 0.7"
      [ -n "${KV_GIB:-}" ] && kv="--mem-fraction-static 0.9 --max-total-tokens $((KV_GIB * 8192))"
      PYTHONPATH=${SGLANG_SITE:+$SGLANG_SITE:}$PYTHONPATH setsid python3 -m sglang.launch_server --host 127.0.0.1 \
        --model-path "$model" --load-format dummy --skip-tokenizer-init --port "${ports[$1]}" \
        --attention-backend "${BACKEND:-fa3}" --sampling-backend pytorch --max-running-requests "$slots" \
        --incremental-streaming-output --stream-interval 8 $kv ${SGLANG_FLAGS:-} >"$out/$1-server.log" 2>&1 &
      ;;
    vllm-server)
      PYTHONPATH=${VLLM_SITE:+$VLLM_SITE:}$PYTHONPATH setsid python3 -m vllm.entrypoints.openai.api_server --host 127.0.0.1 \
        --model "$model" --load-format dummy --port "${ports[$1]}" --tokens-only --logprobs-mode processed_logprobs \
        --max-num-seqs "$slots" --stream-interval 8 --max-model-len 4400 --gpu-memory-utilization $utilization \
        ${KV_GIB:+--kv-cache-memory-bytes $((KV_GIB << 30))} ${VLLM_FLAGS:-} >"$out/$1-server.log" 2>&1 &
      ;;
    *) echo "no such engine: $1" >&2 && exit 2 ;;
  esac
  pids[$1]=$!
}

flags_of() {
  case $1 in
    vllm)
      echo "--engine vllm --engine-options load_format dummy gpu_memory_utilization $utilization" \
        "${KV_GIB:+kv_cache_memory_bytes $((KV_GIB << 30))} ${ENGINE_OPTIONS:-}"
      ;;
    *) echo "--engine $1 --engine-urls http://127.0.0.1:${ports[$1]} ${ENGINE_OPTIONS:+--engine-options $ENGINE_OPTIONS}" ;;
  esac
}

stop() { # what a server printed stays as text: its settings and its end
  set +e
  for engine in "${!pids[@]}"; do
    kill -KILL -- "-${pids[$engine]}" 2>/dev/null
    wait "${pids[$engine]}" 2>/dev/null
    { head -c 10000 "$out/$engine-server.log" && tail -c 20000 "$out/$engine-server.log"; } >"$out/$engine-server.txt"
    rm -f "$out/$engine-server.log"
  done
}
trap stop EXIT

for engine in "${engines[@]}"; do [ "$engine" = vllm ] || start "$engine"; done
for engine in "${!pids[@]}"; do
  until python3 -c "import urllib.request as u; u.urlopen('http://127.0.0.1:${ports[$engine]}/health', timeout=2)" 2>/dev/null; do
    kill -0 "${pids[$engine]}" || { tail -40 "$out/$engine-server.log"; exit 1; }
    sleep 2
  done
  echo "$engine ready after $SECONDS s"
done
if [ -z "${PROFILE:-}" ]; then
  for engine in ${PROFILED-${engines[*]}}; do
    python3 -m sortedrl profile --model "$model" $(flags_of "$engine") --slots "$slots" \
      --max-context-tokens "${CONTEXT:-4400}" --repeats 1 --out "$out/$engine-profile.json"
    echo "profile of $engine after $SECONDS s"
  done
fi
for entry in ${MODES:-$default}; do
  for engine in "${engines[@]}"; do
    [ "$entry" = "${entry#*/}" ] || [ "${entry%%/*}" = "$engine" ] || continue
    updates=${entry##*:} mode=${entry%:*}
    mode=${mode#*/}
    [ $SECONDS -lt "${BUDGET:-540}" ] || { echo "no time left for $mode on $engine"; continue; }
    file=$out/$engine-${mode//[+@]/-}
    name=$file round=1
    while [ -e "$file.json" ]; do file=$name-$((++round)); done
    profile=$out/$engine-profile.json
    [[ " ${PROFILED-${engines[*]}} " == *" $engine "* ]] || profile=h200-8b
    python3 -m sortedrl bench --model "$model" $(flags_of "$engine") --step-time "${PROFILE:-$profile}" \
      --slots "$slots" --rollouts-per-update "$slots" --prompts-per-cohort $((4 * slots)) --cohorts 4 \
      --updates "$updates" --median-length "${MEDIAN:-636.85}" --max-response-tokens "${LIMIT:-4096}" \
      --prompt-tokens 128 --seed 5 --modes "$mode" --out "$file.json"
    echo "$mode on $engine after $SECONDS s"
  done
done
