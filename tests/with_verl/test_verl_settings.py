"""From verl's configuration to a schedule; what cannot be honored is refused by name."""

import pytest
from omegaconf import OmegaConf
from verl_config import ROLLOUT, SEPARATE, compose

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.strategies.registry import STRATEGIES
from sortedrl.integrations.verl.settings import has_own_gpus, settings_of, slots_of
from sortedrl.integrations.verl.trainer import minibatch_order

FILTER = ["algorithm.filter_groups.enable=True"]
CORRECTION = "algorithm.rollout_correction"


def test_what_verl_knows_is_read() -> None:
    settings = settings_of(compose("on-policy", prompts=6, siblings=4))
    schedule = settings.schedule
    assert (schedule.mode, schedule.rollouts_per_update, schedule.rollouts_per_prompt) == ("on-policy", 24, 4)
    assert schedule.whole_groups
    assert schedule.prompts_per_cohort == 24
    assert (schedule.max_prompt_tokens, schedule.max_response_tokens) == (64, 128)
    assert settings.slots is None
    assert settings.minibatches == 1
    assert settings.max_rejected_fraction == 0.5


def test_the_keys_of_the_mode() -> None:
    more = [
        "+trainer.v1.sortedrl.prompts_per_cohort=32",
        "+trainer.v1.sortedrl.slots=3",
        "+trainer.v1.sortedrl.folder=/x",
        "+trainer.v1.sortedrl.max_environment_seconds=7",
        "+trainer.v1.sortedrl.max_rejected_fraction=0.1",
    ]
    settings = settings_of(compose("partial", *more))
    assert settings.schedule.mode == "partial+elevator"
    assert settings.schedule.max_staleness == 4
    assert settings.schedule.prompts_per_cohort == 32
    assert settings.schedule.max_environment_seconds == 7
    assert settings.slots == 3
    assert str(settings.folder) == "/x"
    assert settings.max_rejected_fraction == 0.1


def test_reinforce_plus_plus_needs_no_whole_groups() -> None:
    config = compose("partial", "algorithm.adv_estimator=reinforce_plus_plus")
    assert not settings_of(config).schedule.whole_groups


@pytest.mark.parametrize("metric", ["null", "reward", "score", "seq_reward", "seq_final_reward"])
def test_filter_groups_by_the_reward(metric: str) -> None:
    more = [*FILTER, f"algorithm.filter_groups.metric={metric}", "+trainer.v1.sortedrl.max_filtered_fraction=0.8"]
    settings = settings_of(compose("partial", *more))
    assert (settings.schedule.filter_groups, settings.filter_metric) == ("equal_rewards", None)
    assert settings.schedule.max_filtered_fraction == 0.8


def test_filter_groups_by_another_metric() -> None:
    more = ["algorithm.filter_groups.metric=acc", "algorithm.adv_estimator=reinforce_plus_plus"]
    settings = settings_of(compose("partial", *FILTER, *more))
    assert (settings.schedule.filter_groups, settings.filter_metric) == (None, "acc")
    assert settings.schedule.whole_groups, "groups are judged whole"
    assert settings_of(compose("partial", *more)).filter_metric is None, "not enabled"


@pytest.mark.parametrize(
    ("setting", "more", "named"),
    [
        ("partial", ["+trainer.v1.sortedrl.cohort=3"], "trainer.v1.sortedrl.cohort"),
        ("partial", ["trainer.v1.sortedrl.mode=partail"], "mode"),
        ("partial", ["trainer.v1.sortedrl.max_staleness=0"], "trainer.v1.sortedrl.max_staleness"),
        ("partial", ["+trainer.v1.sortedrl.slots=0"], "trainer.v1.sortedrl.slots"),
        ("partial", ["+trainer.v1.sortedrl.max_rejected_fraction=2"], "trainer.v1.sortedrl.max_rejected_fraction"),
        ("on-policy", ["+trainer.v1.sortedrl.max_staleness=2"], "max_staleness"),
        ("partial", ["actor_rollout_ref.rollout.calculate_log_probs=False"], "calculate_log_probs"),
        (
            "on-policy",
            ["trainer.v1.sortedrl.mode=cohort-at-once", "actor_rollout_ref.rollout.calculate_log_probs=False"],
            "calculate_log_probs",
        ),
        ("partial", [f"{CORRECTION}.rollout_is=null"], f"Add {CORRECTION}.rollout_is=token to the command line"),
        ("partial", [f"{CORRECTION}.rollout_is_threshold=null"], f"Add {CORRECTION}.rollout_is_threshold=2.0"),
        (
            "partial",
            [f"{CORRECTION}.rollout_is=null", f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.loss_type=reinforce"],
            f"Add {CORRECTION}.rollout_is=token",
        ),
        ("partial", ["actor_rollout_ref.actor.use_dynamic_bsz=False"], "actor_rollout_ref.actor.use_dynamic_bsz"),
        ("partial", [*FILTER, "actor_rollout_ref.rollout.n=1"], "actor_rollout_ref.rollout.n"),
        ("partial", [*FILTER, "algorithm.filter_groups.max_num_gen_batches=10"], "max_filtered_fraction"),
        ("partial", [*FILTER, "algorithm.filter_groups.max_inflight_gen_batches=2"], "max_inflight_gen_batches"),
        ("partial", ["+trainer.v1.sortedrl.max_filtered_fraction=2"], "trainer.v1.sortedrl.max_filtered_fraction"),
        ("on-policy", [*FILTER, "trainer.v1.sortedrl.mode=tail-batching"], "filter_groups"),
        ("partial", ["+trainer.v1.sortedrl.overlap=True"], "actor_rollout_ref.hybrid_engine=False"),
        ("on-policy", [*SEPARATE, "+trainer.v1.sortedrl.overlap=True"], "overlap = True: mode on-policy"),
        ("partial", [*SEPARATE, "trainer.v1.sortedrl.max_staleness=null"], "trainer.v1.sortedrl.max_staleness"),
        ("partial", [*SEPARATE, "+trainer.v1.sortedrl.stream=True"], "trainer.v1.sortedrl.stream = True: no such key"),
        ("partial", [*SEPARATE, f"{ROLLOUT}.nnodes=0"], f"{ROLLOUT}.nnodes"),
        ("partial", [*SEPARATE, f"{ROLLOUT}.checkpoint_engine.backend=naive"], "Set it to nccl"),
        ("partial", [*SEPARATE, "actor_rollout_ref.model.lora_rank=8"], "actor_rollout_ref.model.lora.merge"),
        ("partial", [*SEPARATE, "actor_rollout_ref.model.lora.rank=8"], "actor_rollout_ref.model.lora.merge"),
        ("partial", ["reward.reward_model.enable=True"], "reward.reward_model.enable_resource_pool"),
        ("partial", ["algorithm.adv_estimator=remax"], "algorithm.adv_estimator"),
        ("partial", ["trainer.v1.sampler.custom_sampler.path=x.py"], "trainer.v1.sampler.custom_sampler.path"),
        ("partial", ["trainer.v1.sampler.max_off_policy_threshold=2"], "set trainer.v1.sortedrl.max_staleness"),
        ("partial", ["trainer.v1.sampler.max_off_policy_strategy=wait"], "max_off_policy_strategy"),
        ("partial", ["trainer.v1.sampler.sync_refill_failed_groups=True"], "sync_refill_failed_groups"),
        (
            "partial",
            ["critic.enable=True", "critic.ppo_mini_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=4"],
            "critic.ppo_mini_batch_size",
        ),
        ("partial", ["critic.enable=True", "critic.use_dynamic_bsz=False"], "critic.use_dynamic_bsz"),
        (
            "partial",
            ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=False"],
            "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(setting: str, more: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        settings_of(compose(setting, *more))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mode", [name for name in STRATEGIES if name != "async-pool"])  # overlap: not in verl
def test_verls_defaults_are_refused_by_modes_that_train_on_stale_tokens_and_fit_the_others(mode: str) -> None:
    """Whoever leaves the line out must not train on stale tokens as if they were on-policy."""
    config = compose("on-policy", f"trainer.v1.sortedrl.mode={mode}")
    assert config.algorithm.rollout_correction.rollout_is is None
    if STRATEGIES[mode].on_policy:
        settings_of(config)
        return
    with pytest.raises(ConfigurationError, match="rollout_is=token"):
        settings_of(config)


def test_the_ratio_against_the_sampling_policy_is_a_correction_too() -> None:
    settings_of(compose("partial", f"{CORRECTION}.rollout_is=null", f"{CORRECTION}.bypass_mode=True"))


@pytest.mark.parametrize(("ranks", "minibatches"), [(1, 1), (1, 4), (2, 3), (4, 2)])
def test_every_mini_batch_of_a_rank_has_the_same_mix_of_lengths(ranks: int, minibatches: int) -> None:
    count = 12 * ranks * minibatches
    lengths = sorted(10 * place for place in range(count))
    order = minibatch_order(lengths, ranks, minibatches)
    assert sorted(order) == list(range(count))
    per_rank = count // ranks
    for rank in range(ranks):
        rows = order[rank * per_rank : (rank + 1) * per_rank]
        assert sorted(rows) == list(range(rank * per_rank, (rank + 1) * per_rank)), "a rank keeps its rows"
        size = per_rank // minibatches
        means = [sum(lengths[row] for row in rows[i : i + size]) / size for i in range(0, per_rank, size)]
        assert max(means) - min(means) <= 10 * (minibatches - 1)


def test_servers_with_gpus_of_their_own_generate_during_steps_in_partial_modes() -> None:
    partial = settings_of(compose("partial", *SEPARATE)).schedule
    assert (partial.overlap, partial.max_staleness, partial.oversubscribe) == (True, 4, 5.0)
    in_turn = ["+trainer.v1.sortedrl.overlap=False", "trainer.v1.sortedrl.max_staleness=null"]
    assert not settings_of(compose("partial", *SEPARATE, *in_turn)).schedule.overlap
    assert not settings_of(compose("on-policy", *SEPARATE)).schedule.overlap
    assert not settings_of(compose("partial")).schedule.overlap
    of_user = settings_of(compose("partial", *SEPARATE, "+trainer.v1.sortedrl.oversubscribe=2")).schedule
    assert of_user.oversubscribe == 2


ENGINES = {
    "fsdp": [],
    "megatron": ["model_engine=megatron"],
    "lora": ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=True"],
    "several nodes": ["trainer.nnodes=4", "trainer.n_gpus_per_node=8"],
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", [[], [*SEPARATE, f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=8"]])
def test_the_mode_composes_with_verls_training_engines(engine: str, layout: list[str]) -> None:
    """Only composed, not run."""
    left_out = ["actor_rollout_ref.actor.strategy", "actor_rollout_ref.actor.fsdp_config"]
    ours = compose("partial", *ENGINES[engine], *layout, leave_out=left_out)
    assert has_own_gpus(ours) == settings_of(ours).schedule.overlap == bool(layout)
    if engine == "megatron":
        assert OmegaConf.select(ours, "actor_rollout_ref.actor.strategy") == "megatron"


def test_slots_follow_the_update(caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_of(compose("partial", prompts=6, siblings=4))
    assert slots_of(settings, 1024) == 24 and slots_of(settings, 16) == 16
    assert slots_of(settings_of(compose("partial", "+trainer.v1.sortedrl.slots=30", prompts=6, siblings=4)), 1024) == 30
    assert not caplog.records
    many = settings_of(compose("partial", "+trainer.v1.sortedrl.slots=96", prompts=6, siblings=4))
    assert slots_of(many, 1024) == 96 and "96 slots are 4.0 times an update of 24 rollouts" in caplog.text
