"""`sortedrl eval`: score a model on held-out problems."""

import json

from sortedrl.cli.output import ProgressBar, line_log, print_settings, stdout_reserved_for_json, training_module
from sortedrl.training.settings import EvalSettings, check_what_must_exist

SETTINGS = EvalSettings


def run(settings: EvalSettings) -> int:
    with stdout_reserved_for_json(settings):
        check_what_must_exist(settings, import_user_code=settings.dry_run, asks_engine=not settings.dry_run)
    if settings.dry_run:
        derived = {"samples_in_all_at_most": settings.eval_problems * settings.eval_samples}
        return print_settings(settings, derived)
    with stdout_reserved_for_json(settings):
        evaluate = training_module("evaluate")
        with ProgressBar("evaluating", quiet=settings.json_output) as progress:
            result = evaluate.evaluate_model(settings, line_log(settings), progress)
    if settings.json_output:
        print(json.dumps(result))
        return 0
    for name in ("mean", "pass"):
        value = result[f"{name}_at_k"]
        print(f"{name}@{result['samples']} {value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]")
    return 0
