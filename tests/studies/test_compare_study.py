"""The file of a study: which arms it names, and what is refused."""

import tomllib
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.core.configuration import ConfigurationError
from sortedrl.studies.compare.study import Study, arms_of, parsed_study, validate_runs
from sortedrl.studies.compare.study_folder import toml_of

TWO_ARMS = """
seeds = 2
[settings]
eval_every = 5
[arms.a]
mode = "baseline"
[arms.b]
mode = "partial"
"""
CONTRAST = '[[contrasts]]\narm = "a"\nminus = "b"\noutcome = "final_score"\n'


def study(text: str) -> Study:
    return parsed_study(text, "test")


def test_a_study_has_arms_seeds_and_one_primary_contrast() -> None:
    found = study(TWO_ARMS + CONTRAST)
    assert found.seeds == (0, 1)
    assert found.arms == {"a": {"mode": "baseline"}, "b": {"mode": "partial"}}
    assert found.settings_of("b") == {"threads": 1, "eval_every": 5, "mode": "partial"}
    assert found.primary.name == "a minus b"


def test_a_grid_is_the_product_of_its_axes_named_by_their_values() -> None:
    grid = {
        "mode": ["cohort-at-once", "cohort-at-once+sorted"],
        "normalizer": {"batch": {"algorithm": "reinforce++"}, "group": {"algorithm": "grpo"}},
        "max_staleness": [4],
    }
    assert arms_of({}, {}, grid) == {
        f"{mode},{name},max_staleness=4": {"mode": mode, "algorithm": algorithm, "max_staleness": 4}
        for mode, (name, algorithm) in product(grid["mode"], [("batch", "reinforce++"), ("group", "grpo")])
    }


def test_arms_are_run_at_every_point_of_the_grid() -> None:
    arms = {"slow": {"learning_rate": 1e-4}, "fast": {"learning_rate": 1e-3}}
    found = arms_of({}, arms, {"mode": ["baseline", "partial"], "overlap": [True]})
    assert list(found) == [f"{arm},{mode},overlap=true" for arm in arms for mode in ("baseline", "partial")]
    assert found["fast,partial,overlap=true"] == {"learning_rate": 1e-3, "mode": "partial", "overlap": True}


REFUSED: dict[str, tuple[str, list[str]]] = {
    "unknown key": (TWO_ARMS.replace("seeds", "seed_s") + CONTRAST, ["seed_s", "Did you mean seeds?"]),
    "unknown key of a contrast": (TWO_ARMS + CONTRAST + "outcom = 1", ["outcom", "Did you mean outcome?"]),
    "unknown arm": (TWO_ARMS + CONTRAST.replace('"b"', '"bb"'), ["'bb'", "Did you mean b?"]),
    "unknown outcome": (TWO_ARMS + CONTRAST.replace("final_score", "final_scor"), ["Did you mean final_score?"]),
    "no threshold": (TWO_ARMS + CONTRAST.replace("final_score", "samples_to_threshold"), ["no threshold"]),
    "no evaluations": (
        TWO_ARMS.replace("eval_every = 5", "") + CONTRAST.replace("final_score", "curve_area"),
        ["eval_every", "curve_area"],
    ),
    "no seeds": (TWO_ARMS.replace("seeds = 2", "") + CONTRAST, ["seeds", "seeds = 8"]),
    "a seed twice": (TWO_ARMS.replace("seeds = 2", "seeds = [1, 1]") + CONTRAST, ["twice"]),
    "no arms": ("seeds = 2\n" + CONTRAST, ["compares nothing"]),
    "no contrasts": (TWO_ARMS, ["contrasts", "nothing to compare"]),
    "an arm minus itself": (TWO_ARMS + CONTRAST.replace('"b"', '"a"'), ["itself"]),
    "no primary": (TWO_ARMS + CONTRAST + CONTRAST.replace("final_score", "seconds"), ["no contrast is primary"]),
    "two primaries": (
        TWO_ARMS + CONTRAST + "primary = true\n" + CONTRAST.replace("final_score", "seconds") + "primary = true",
        ["several contrasts are primary"],
    ),
    "an arm twice": (TWO_ARMS + '[arms.a]\nmode = "partial"\n' + CONTRAST, ["not TOML", "arms"]),
    "equal arms": (TWO_ARMS.replace("partial", "baseline") + CONTRAST, ["another arm has its name or its settings"]),
    "a value of the grid twice": (
        'seeds = 1\n[grid]\nmode = ["x", "x"]\n' + CONTRAST,
        ["'x'", "another arm has its name or its settings"],
    ),
    "a name that is no folder": (TWO_ARMS.replace("[arms.a]", '[arms."../a"]') + CONTRAST, ["'../a'", "folder"]),
    "a name that no file system takes": (
        TWO_ARMS.replace("[arms.a]", f"[arms.{'a' * 201}]") + CONTRAST.replace('"a"', f'"{"a" * 201}"'),
        ["at most 200"],
    ),
    "a seed in an arm": (TWO_ARMS.replace('"baseline"', '"baseline"\nseed = 1') + CONTRAST, ["seed", "seeds = "]),
    "set twice": (TWO_ARMS + '[grid]\nmode = ["x"]\n' + CONTRAST, ["'b,x'", "its settings"]),
    "a metric that is an outcome": ('metrics = ["seconds"]\n' + TWO_ARMS + CONTRAST, ["seconds", "already"]),
    "not TOML": ("seeds = = 2", ["not TOML", "line 1"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_study_is_refused_in_one_line(name: str) -> None:
    text, expected = REFUSED[name]
    with pytest.raises(ConfigurationError) as refused:
        study(text)
    message = str(refused.value)
    assert "\n" not in message
    for words in expected:
        assert words in message


def test_every_run_is_validated_and_the_error_names_its_arm() -> None:
    seen: list[tuple[str, int]] = []

    def validate(settings: dict[str, Any]) -> None:
        seen.append((settings["mode"], settings["seed"]))
        if seen[-1] == ("partial", 1):
            raise ConfigurationError("mode", "partial", "not today", "Wait.")

    with pytest.raises(ConfigurationError, match=r"not today \(arm b\)"):
        validate_runs(study(TWO_ARMS + CONTRAST), validate)
    assert seen == [*product(("baseline", "partial"), (0, 1))]


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), VALUES))
def test_settings_survive_the_way_through_a_file(values: dict[str, Any]) -> None:
    assert tomllib.loads(toml_of(values)) == values
