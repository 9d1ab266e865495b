#!/usr/bin/env bash
# Updates per hour with the learner in it: engine and learner together on one GPU with 140 GB, no network.
#
#   benchmarks/end_to_end.sh SHAPE [OUT]
#
# 8b      LLaMA-3.1-8B's shape; predicted from benchmarks/measured/h200-8b. Start 60 s; then 31 to 37 s per update in
#         baseline and on-policy modes and 27 to 29 s in partial modes. From the fourth update on they take longer
# 1.5b    Qwen2.5-1.5B's shape; predicted from benchmarks/measured/h200-1.5b; 13 to 23 s per update
# tiny    a trial on a CPU
#
# MODES (in this order) and UPDATES per mode (the first is not counted) select the runs. The prompts depend on UPDATES:
# compare modes of commands with equal UPDATES only. A mode with :N ends after N updates, on the same prompts.
# ROUNDS runs all of them so often: the speed of small models varies with that of a CPU core, by 1.4 x within a command.
# CALIBRATE=1 measures the profile first (90 s). No update starts after STOP_AFTER seconds. LEARNER_SPEED: tokens per
# second of benchmarks/update_7b.py for the prediction. MORE: further options of end_to_end.py. With a :sleep or :offload
# among the modes the engine starts in sleep mode for all of them, so run these apart from the others.
# Memory of the 8B shape, GiB of 139.8: learner 75 at rest, gradients 15, activations 6 with micro-batches of 8,192
# tokens, engine weights 15, KV cache 20 (163,840 tokens), graphs and CUDA context 5.
# ENGINE=sglang: an SGLang server (its packages in SGLANG_SITE) instead of vLLM in this process. It needs 5 GiB more, so
# use MORE="--kv-gib 16"; prefill graphs are off, which take longest to start. BACKEND names its attention (default:
# fa3), FLAGS are more flags of the server. SGLang
# reserves 0.7 of the tokens that a request may still make: here --schedule-conservativeness lowers that, or slots stay
# empty. THEN: a command to run while the server is still there, at http://127.0.0.1:30000.
# Results are written after every update, to OUT (default: h200).
set -euo pipefail -f # modes may contain a star
shape=${1:?usage: end_to_end.sh SHAPE [OUT]}
mkdir -p "${2:-h200}"
out=$(realpath "${2:-h200}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}
unset PYTHONDONTWRITEBYTECODE # compiling vLLM's many modules in every process takes longer than loading them
some=${MODES:-baseline partial+elevator:reuse baseline:stream partial+elevator on-policy on-policy+planned@oracle \
  partial partial:reuse}
# Micro-batches of many sizes would leave gaps in memory. vLLM's sleep mode and CUDA IPC cannot do without plain segments.
[[ $some == *:sleep* || $some == *:offload* || ${ENGINE:-vllm} != vllm ]] ||
  export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
[ "${ENGINE:-vllm}" = vllm ] || unset PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
[ "$shape" != tiny ] || CALIBRATE=1
more=(${MORE:-})
if [ "${ENGINE:-vllm}" = sglang ]; then
  case $shape in
    8b) folder=llama-3.1-8b kv_tokens=131072 slots=128 ;;
    1.5b) folder=qwen2.5-1.5b kv_tokens=300000 slots=128 ;;
    tiny) folder=tiny kv_tokens=16384 slots=16 ;;
  esac
  [ "$shape" = tiny ] || FLAGS="--attention-backend ${BACKEND:-fa3} --cuda-graph-max-bs-decode 128 --schedule-conservativeness 0.3 ${FLAGS:-}"
  # shellcheck disable=SC2086
  PYTHONPATH=${SGLANG_SITE:+$SGLANG_SITE:}$PYTHONPATH setsid "${PYTHON:-python3}" -m sglang.launch_server --host 127.0.0.1 \
    --port 30000 --model-path benchmarks/shapes/$folder --load-format dummy --skip-tokenizer-init --sampling-backend pytorch \
    --max-running-requests $slots --incremental-streaming-output --stream-interval 8 --mem-fraction-static 0.4 \
    --max-total-tokens $kv_tokens --chunked-prefill-size 4096 --cuda-graph-backend-prefill disabled --skip-server-warmup \
    ${FLAGS:-} >"$out/server.log" 2>&1 &
  server=$! main=
  # With all of its processes, and waiting for their end: what comes next needs the memory.
  trap 'set +e; kill -KILL -- -$server $main 2>/dev/null; wait $server 2>/dev/null
    tail -c 30000 "$out/server.log" >"$out/server.txt"; rm -f "$out/server.log"' EXIT
  more+=(--sglang-url http://127.0.0.1:30000)
  CALIBRATE=
fi
# shellcheck disable=SC2086
run() { "${PYTHON:-python3}" benchmarks/end_to_end.py --shape "$shape" --modes $some --updates "${UPDATES:-5}" \
  --rounds "${ROUNDS:-1}" --out "$out" --stop-after "${STOP_AFTER:-550}" ${CALIBRATE:+--calibrate} \
  ${LEARNER_SPEED:+--learner-tokens-per-second $LEARNER_SPEED} "${more[@]}"; }
if [ -z "${server:-}" ]; then
  run
else
  run &
  main=$!
  wait -n "$server" "$main" || true # of a server that ends the run would wait for long
  kill -0 "$server" 2>/dev/null || { tail -n 40 "$out/server.log"; exit 1; }
  failed=0
  wait "$main" || failed=$?
  [ -z "${THEN:-}" ] || bash -c "$THEN"
  exit "$failed"
fi
