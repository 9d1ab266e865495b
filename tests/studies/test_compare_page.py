"""From raw results to numbers, tables and the page, on results that are made up here."""

import io
import json
import random
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

from chromium import Chromium, chromium_or_skip
from sortedrl.cli import main
from sortedrl.studies.compare import page as text
from sortedrl.studies.compare.comparison import Comparison, as_json, compare
from sortedrl.studies.compare.page import difference_charts
from sortedrl.studies.compare.results import append, problems_in, read_results
from sortedrl.studies.compare.study import parsed_study, read_study
from sortedrl.studies.compare.study_folder import record_plan, run_study

SEEDS = 8
STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"
STUDY = """
question = "Is <b>fast</b> faster?"
seeds = 8
threshold = 0.7
metrics = ["entropy"]
[settings]
eval_every = 10
[arms.slow]
mode = "baseline"
[arms.fast]
mode = "partial+elevator"
[arms.never]
mode = "partial"
[[contrasts]]
arm = "fast"
minus = "slow"
outcome = "samples_to_threshold"
primary = true
[[contrasts]]
arm = "never"
minus = "slow"
outcome = "curve_area"
[[contrasts]]
arm = "never"
minus = "slow"
outcome = "samples_to_threshold"
"""
GAIN = {"slow": 0.11, "fast": 0.16, "never": 0.02}  # of the score per evaluation


def line(arm: str, seed: int) -> dict[str, Any]:
    """A straight learning curve whose slope depends on the arm, with the luck of the seed."""
    luck = 0.02 * random.Random(seed).random()
    scores = [0.2 + (GAIN[arm] + luck) * i for i in range(6)]
    return {
        "arm": arm,
        "seed": seed,
        "settings": {"threads": 1, "eval_every": 10, "mode": parsed_study(STUDY, "x").arms[arm]["mode"]},
        "curve": {
            "update": [10 * i for i in range(6)],
            "rollouts": [1280 * i for i in range(6)],
            "seconds": [30.0 * i for i in range(6)],
            "score": scores,
        },
        "series": {"length": [100.0 + seed] * 50, "correct": [0.5] * 50, "entropy": [1.0] * 49 + [None]},
        "rollouts_per_update": [128] * 50,
        "metrics": {"staleness": 1.5, "bubble": 0.1, "goodput": 1000.0, "waste": 0.0, "length_bias": None},
        "wall_seconds": 200.0,
        "device": "NVIDIA H200",
        "versions": {"sortedrl": "0.2", "torch": "2.11"},
    }


def failed_line(seed: int, error: str) -> dict[str, Any]:
    return {"arm": "fast", "seed": seed, "settings": line("fast", seed)["settings"], "error": error}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "study.toml").write_text(STUDY)
    for seed in range(SEEDS):
        for arm in GAIN:
            append(tmp_path / "results.jsonl", line(arm, seed))
    return tmp_path


def compared(folder: Path) -> Comparison:
    return compare(parsed_study((folder / "study.toml").read_text(), "x"), read_results(folder / "results.jsonl"))


def test_the_primary_contrast_is_paired_by_seed(folder: Path) -> None:
    found = compared(folder)
    fast, slow = ([run.outcomes["samples_to_threshold"] or 0 for run in found.of_arm(arm)] for arm in ("fast", "slow"))
    assert found.primary.arm == "fast" and found.primary.seeds == tuple(range(SEEDS))
    assert found.primary.difference is not None and found.primary.censoring is not None
    assert found.primary.difference.mean == pytest.approx(fmean(fast) - fmean(slow))
    assert found.primary.difference.relative == pytest.approx(fmean(fast) / fmean(slow) - 1)
    assert (found.primary.censoring.arm_first, found.primary.censoring.minus_first) == (8, 0)
    assert "fast is lower" in text.answer(found.primary)
    assert not found.primary.anecdote


def test_the_same_difference_with_every_seed_is_drawn_without_an_interval(folder: Path) -> None:
    found = compared(folder)
    assert found.contrasts[1].difference is not None and found.contrasts[1].difference.t_interval is None
    charts = {chart.id: chart.views[""]["data"][0] for chart in difference_charts(found)}
    assert charts["difference-curve_area"]["x"] == pytest.approx([-0.225])
    assert charts["difference-curve_area"]["error_x"]["array"] == [None]
    assert all(half > 0 for half in charts["difference-samples_to_threshold"]["error_x"]["array"])


def test_an_arm_that_never_reaches_the_threshold_is_compared_by_what_is_known(folder: Path) -> None:
    never = compared(folder).contrasts[2]
    assert never.censoring is not None and never.difference is not None
    assert (never.censoring.arm_censored, never.censoring.arm_median) == (8, None)
    assert never.censoring.horizon == 6400 == never.difference.arm_mean
    assert never.difference.mean > 0
    assert "8 runs of never and 0 of slow never reached the threshold" in text.censoring(never)


def test_a_threshold_below_the_scores_at_the_start_and_a_metric_that_no_run_has_are_noticed(folder: Path) -> None:
    assert compared(folder).notices == ()
    (folder / "study.toml").write_text(
        STUDY.replace("threshold = 0.7", "threshold = 0.2").replace("entropy", "entropi")
    )
    assert compared(folder).notices == (
        "no run has the metric entropi in its metrics.jsonl",
        "24 of 24 runs are at the threshold of 0.2 before their first update: set it higher",
    )


def test_arms_that_trained_on_different_numbers_of_rollouts_are_noticed(folder: Path) -> None:
    """As under a staleness bound: a longer run has the better score, whichever arm learns more per rollout."""
    assert not any("rollouts" in notice for notice in compared(folder).notices)
    for seed in range(SEEDS):
        longer = line("fast", seed)
        longer["curve"]["rollouts"] = [2 * rollouts for rollouts in longer["curve"]["rollouts"]]
        append(folder / "results.jsonl", longer)
    assert [notice for notice in compared(folder).notices if "rollouts" in notice] == [
        "the runs of fast trained on 12,800 rollouts, those of slow on 6,400: final_score and curve_area favor the "
        "longer runs. Compare samples_to_threshold instead"
    ]


def test_failed_and_missing_runs_are_counted_and_their_seeds_left_out(folder: Path) -> None:
    append(folder / "results.jsonl", failed_line(3, "CUDA out of memory (exit code 2)"))
    (folder / "study.toml").write_text(STUDY.replace("seeds = 8", "seeds = 9"))
    found = compared(folder)
    assert [(one["arm"], one["seed"]) for one in found.failures] == [("fast", 3)]
    assert found.not_run == (("slow", 8), ("fast", 8), ("never", 8))
    assert found.primary.missing_seeds == (3, 8)
    assert found.primary.anecdote
    caveats = " ".join(text.caveats(found))
    assert "anecdote" in caveats and "Failed: 1 run." in caveats and "Not finished: 3 runs." in caveats


def test_a_folder_that_cannot_be_written_to_is_refused(folder: Path, refused: Any) -> None:
    for out in (folder / "study.toml", Path("/proc/nowhere")):
        assert "Name a file that can be written" in refused("compare", "--from", folder, "--out", out)


def test_errors_are_shown_as_they_are(folder: Path, told: Any) -> None:
    """Text in brackets is no markup of the terminal's tables. Control characters do not reach the terminal."""
    errors = {3: "cannot read [/data/x.jsonl] (exit code 2)", 4: "[rank0]: out of memory in a:bug:b (exit code 1)"}
    for seed, error in {**errors, 5: "\x1b[2Jcleared\x07"}.items():
        append(folder / "results.jsonl", failed_line(seed, error))
    shown = told("compare", "--from", folder, code=2).out
    for error in (*errors.values(), r"\x1b[2Jcleared\x07"):
        assert error in shown
    assert not {"\x1b", "\x07"} & set(shown)


def test_seconds_of_a_pair_on_two_devices_are_not_compared(folder: Path) -> None:
    """Seeds 2 and 5 of one arm were run again on a slower device."""
    (folder / "study.toml").write_text(STUDY + '[[contrasts]]\narm = "fast"\nminus = "slow"\noutcome = "seconds"\n')
    for seed in (2, 5):
        on_cpu = line("slow", seed)
        on_cpu["curve"]["seconds"] = [40 * seconds for seconds in on_cpu["curve"]["seconds"]]
        append(folder / "results.jsonl", on_cpu | {"device": "CPU, aarch64, 2 cores"})
    found = compared(folder)
    one = found.contrasts[-1]
    assert (one.seeds, one.other_seeds, one.missing_seeds) == ((0, 1, 3, 4, 6, 7), (2, 5), ())
    assert one.difference is not None and one.difference.mean == 0
    assert found.primary.seeds == tuple(range(SEEDS))
    notices = [notice for notice in found.notices if "for seeds 2, 5;" in notice]
    assert len(notices) == 2 and notices[0].startswith("the runs of fast and slow are on different devices")
    for seed in range(SEEDS):
        append(folder / "results.jsonl", line("slow", seed) | {"device": "CPU, aarch64, 2 cores"})
    one = compared(folder).contrasts[-1]
    assert one.difference is None and text.answer(one).endswith(
        "no seed has both runs on one device and the same problems."
    )


def test_a_pair_whose_problems_changed_in_between_is_not_compared(folder: Path) -> None:
    """The task was edited before `fast` was run with seed 2. The arm `never` has another task on purpose."""
    for arm, seed in ((arm, seed) for arm in GAIN for seed in range(SEEDS)):
        stored = line(arm, seed)
        settings = stored["settings"] | ({"task": "mine:Other"} if arm == "never" else {})
        problems = "aaaa" if arm == "never" else "bbbb" if (arm, seed) == ("fast", 2) else "cccc"
        append(folder / "results.jsonl", stored | {"settings": settings, "problems": problems})
    found = compared(folder)
    assert (found.primary.seeds, found.primary.other_seeds) == ((0, 1, 3, 4, 5, 6, 7), (2,))
    assert found.contrasts[1].seeds == tuple(range(SEEDS))
    notices = [notice for notice in found.notices if "different problems" in notice]
    assert len(notices) == 1 and notices[0].startswith("the runs of fast and slow have different problems for seeds 2:")
    assert as_json(found)["contrasts"][0]["other_seeds"] == (2,)


def test_the_problems_of_a_run_are_those_of_its_newest_checkpoint(tmp_path: Path) -> None:
    assert problems_in(tmp_path) is None
    found = []
    for update, problems in ((3, "0011"), (20, "0022"), (40, "0022")):
        state = tmp_path / "checkpoints" / f"update-{update:06d}" / "state.json"
        state.parent.mkdir(parents=True)
        state.write_text(json.dumps({"notes": {"problems": {"train": problems, "held_out": "0033"}}}))
        found.append(problems_in(tmp_path))
    assert found[0] != found[1] == found[2] is not None
    state.write_text("{")
    assert problems_in(tmp_path) is None


def test_results_are_shown_without_training(folder: Path, told: Any) -> None:
    numbers = json.loads(told("compare", "--from", folder, "--json").out)
    assert numbers == json.loads((folder / "compare.json").read_text())
    assert numbers["arms"]["fast"]["outcomes"]["final_score"]["runs"] == SEEDS
    page = (folder / "compare.html").read_text()
    assert "Is &lt;b&gt;fast&lt;/b&gt; faster?" in page
    assert "never reached the threshold" in page


@pytest.mark.parametrize("is_torn", [True, False])
def test_a_torn_last_line_is_left_out_and_a_whole_one_without_a_line_feed_is_not(folder: Path, is_torn: bool) -> None:
    """An editor may leave an empty line, and no line feed at the end."""
    path = folder / "results.jsonl"
    text = path.read_text()
    path.write_text(text + '{"arm": "slow", "se' if is_torn else text.replace("\n", "\n\n", 1).removesuffix("\n"))
    assert len(read_results(path).runs) == 3 * SEEDS
    append(path, line("slow", 0))
    assert len(read_results(path).runs) == 3 * SEEDS


@pytest.mark.parametrize(
    "change",
    [
        {"curve": {}},
        {"curve": {"update": [], "rollouts": [], "seconds": [], "score": []}},
        {"curve": {"update": [0], "rollouts": [0], "seconds": [0.0], "score": [0.5, 0.6]}},
        {"series": {}},
        {"device": None},
        {"rollouts_per_update": None},
        {"seed": "0"},
        {"arm": None, "error": "it failed"},
        7,
    ],
)
def test_a_line_that_lacks_a_result_is_refused(folder: Path, refused: Any, change: Any) -> None:
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(line("fast", 0) | change if isinstance(change, dict) else change) + "\n")
    assert f"line {3 * SEEDS + 1} is not the result of a run" in refused("compare", "--from", folder)


def test_results_of_other_settings_are_not_shown_as_those_of_the_study(folder: Path, refused: Any) -> None:
    other = folder / "other.toml"
    other.write_text(STUDY.replace('mode = "baseline"', 'mode = "on-policy"'))
    assert "slow seed 0 was run with mode = 'baseline'" in refused("compare", other, "--from", folder)


def test_a_dry_run_of_stored_results_writes_nothing(folder: Path, told: Any) -> None:
    before = sorted(folder.iterdir())
    assert "# 3 arms x 8 seeds = 24 runs" in told("compare", "--from", folder, "--dry-run").out
    assert sorted(folder.iterdir()) == before


def shown(comparison: Comparison, width: int = 1000) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for part in text.parts(comparison):
        console.print(part)
    return console.export_text()


def continued(folder: Path, study_text: str) -> Comparison:
    """The study is run again; all of its runs have a result."""
    return run_study(parsed_study(study_text, "x"), folder, 1, lambda line: None)


def planned(folder: Path, *studies: str) -> Path:
    """The same results, after these plans."""
    results = folder / "results.jsonl"
    lines = results.read_text()
    results.unlink()
    for one in studies:
        record_plan(results, parsed_study(one, "x"))
    results.write_text(results.read_text() + lines)
    return results


def test_a_study_that_stays_as_it_was_planned_says_so(folder: Path) -> None:
    results = planned(folder, STUDY.replace("threshold = 0.7", "threshold = 0.6"), STUDY)  # before any result
    before = results.read_text()
    found = continued(folder, STUDY)
    assert f"Study {parsed_study(STUDY, 'x').digest}: as planned before the first result." in shown(found)
    assert not as_json(found)["study_changes"]
    assert results.read_text() == before, "the same plan is recorded once"


CHANGED_PLANS = {
    "seeds": (STUDY.replace("seeds = 8", "seeds = 6"), "seeds [0, 1, 2, 3, 4, 5, 6, 7] -> [0, 1, 2, 3, 4, 5]"),
    "threshold": (STUDY.replace("threshold = 0.7", "threshold = 0.5"), "threshold 0.7 -> 0.5"),
    "primary": (
        STUDY.replace("primary = true\n", "").replace('"curve_area"', '"curve_area"\nprimary = true'),
        "primary fast minus slow, samples_to_threshold -> never minus slow, curve_area",
    ),
    "arms": (
        STUDY.replace("[arms.never]", "[arms.none]\nslots = 8\n[arms.never]"),
        "arms ['slow', 'fast', 'never'] -> ['slow', ",
    ),
}


@pytest.mark.parametrize("key", CHANGED_PLANS)
def test_a_study_that_changed_after_results_were_known_is_reported(folder: Path, key: str) -> None:
    """In the terminal, on the page and in compare.json."""
    changed, said = CHANGED_PLANS[key]
    before = planned(folder, STUDY).read_text()
    (folder / "study.toml").write_text(changed)
    assert main(["compare", "--from", str(folder)]) == 0
    assert f"changed after 24 results were known: {said}" in unescape((folder / "compare.html").read_text())
    (change,) = json.loads((folder / "compare.json").read_text())["study_changes"]
    assert (change["key"], change["after_results"]) == (key, 3 * SEEDS)
    assert (folder / "results.jsonl").read_text() == before, "results that are only read stay as they are"


def test_a_study_that_is_continued_records_its_changes_for_good(folder: Path) -> None:
    planned(folder, STUDY)
    changed, said = CHANGED_PLANS["threshold"]
    assert said in shown(continued(folder, changed))
    back = shown(continued(folder, STUDY))
    assert said in back and "threshold 0.5 -> 0.7" in back


def test_results_of_an_older_version_have_no_plan_but_their_threshold(folder: Path) -> None:
    assert "these results have no record of the study as planned" in shown(compared(folder))
    found = compare(read_study(STUDIES / "headline_smollm.toml"), read_results(STUDIES / "headline_smollm.jsonl"))
    assert "threshold 0.4 -> 0.7" in shown(found)
    assert "first recorded after 24 results were known" in shown(continued(folder, STUDY))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(chromium_or_skip(), tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.slow
def test_the_page_draws_curves_with_bands_and_asks_nothing_of_a_network(browser: Chromium, folder: Path) -> None:
    assert main(["compare", "--from", str(folder)]) == 0
    browser.open(folder / "compare.html")
    charts = browser.ask("[...document.querySelectorAll('.chart')].map(div => div.id)")
    assert charts == ["difference-samples_to_threshold", "difference-curve_area", "learning"]
    traces = browser.ask("document.getElementById('learning').data.map(({name, y}) => [name, Array.from(y)])")
    expected = [f"{arm}{part}" for arm in ("slow", "fast", "never") for part in (", low", ", high", "")]
    assert [name for name, _ in traces] == expected
    found = compared(folder)
    for arm in GAIN:
        low, high, mean = (dict(traces)[f"{arm}{part}"] for part in (", low", ", high", ""))
        columns = zip(*(run.curve for run in found.of_arm(arm)), strict=True)
        assert mean == pytest.approx([fmean(point.score for point in column) for column in columns], abs=1e-6)
        assert all(a <= b <= c for a, b, c in zip(low, mean, high, strict=True))
    assert browser.ask("document.querySelectorAll('#run-table tbody tr').length") == 3 * SEEDS
    browser.ask("document.querySelector('input[value=seconds]').click()")
    assert browser.ask("document.getElementById('learning').data[2].x[5]") == 150
    assert not browser.errors
    assert all(url.startswith(("file:", "about:")) for url in browser.requests)
