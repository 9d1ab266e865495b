"""From verl's configuration to a schedule; what cannot be honoured is refused by name."""

from __future__ import annotations

import pytest
from verl_config import compose

from sortedrl.core.schedule import ConfigurationError
from sortedrl.integrations.verl.settings import settings_of


def test_what_verl_knows_is_read() -> None:
    settings = settings_of(compose("on-policy", prompts=6, siblings=4))
    schedule = settings.schedule
    assert (schedule.mode, schedule.rollouts_per_update, schedule.rollouts_per_prompt) == ("on-policy", 24, 4)
    assert schedule.compare_siblings
    assert schedule.prompts_per_cohort == 24
    assert (schedule.max_prompt_tokens, schedule.max_response_tokens) == (64, 128)
    assert settings.slots is None
    assert settings.minibatches == 1


def test_the_keys_of_the_mode() -> None:
    more = [
        "+trainer.v1.sortedrl.prompts_per_cohort=32",
        "+trainer.v1.sortedrl.slots=3",
        "+trainer.v1.sortedrl.folder=/x",
    ]
    settings = settings_of(compose("partial", *more))
    assert settings.schedule.mode == "partial+elevator"
    assert settings.schedule.max_staleness == 4
    assert settings.schedule.prompts_per_cohort == 32
    assert settings.slots == 3
    assert str(settings.folder) == "/x"


def test_reinforce_plus_plus_compares_no_siblings() -> None:
    config = compose("partial", "algorithm.adv_estimator=reinforce_plus_plus")
    assert not settings_of(config).schedule.compare_siblings


@pytest.mark.parametrize(
    ("setting", "more", "named"),
    [
        ("partial", ["+trainer.v1.sortedrl.cohort=3"], "trainer.v1.sortedrl.cohort"),
        ("partial", ["trainer.v1.sortedrl.mode=partail"], "mode"),
        ("partial", ["trainer.v1.sortedrl.max_staleness=0"], "trainer.v1.sortedrl.max_staleness"),
        ("partial", ["+trainer.v1.sortedrl.slots=0"], "trainer.v1.sortedrl.slots"),
        ("on-policy", ["+trainer.v1.sortedrl.max_staleness=2"], "max_staleness"),
        (
            "partial",
            ["actor_rollout_ref.rollout.multi_turn.enable=True"],
            "actor_rollout_ref.rollout.multi_turn.enable",
        ),
        ("partial", ["actor_rollout_ref.rollout.calculate_log_probs=False"], "calculate_log_probs"),
        ("partial", ["actor_rollout_ref.actor.use_dynamic_bsz=False"], "actor_rollout_ref.actor.use_dynamic_bsz"),
        ("partial", ["algorithm.filter_groups.enable=True"], "algorithm.filter_groups.enable"),
        ("partial", ["algorithm.adv_estimator=remax"], "algorithm.adv_estimator"),
        ("partial", ["reward.reward_model.enable=True"], "reward.reward_model.enable_resource_pool"),
        ("partial", ["trainer.v1.sampler.custom_sampler.path=x.py"], "trainer.v1.sampler.custom_sampler.path"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(setting: str, more: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        settings_of(compose(setting, *more))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_multi_turn_is_for_modes_that_start_anew() -> None:
    settings_of(compose("on-policy", "actor_rollout_ref.rollout.multi_turn.enable=True"))
