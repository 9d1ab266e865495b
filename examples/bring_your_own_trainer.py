"""The four-line loop with your own learner. No model, no PyTorch: a policy with a single number learns to be brief.

The simulated engine replaces vLLM; its lengths shrink as the learner's single weight grows. Run it:

    python examples/bring_your_own_trainer.py
"""

from sortedrl import Controller, Prompt, Prompts, Schedule
from sortedrl.core import EventLog
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.simulated_loop import SimulatedScorer
from sortedrl.engines.step_time import PRESETS
from sortedrl.observe.metrics import Metrics


class BrevityLearner:
    """Any learner works: it gets scored rollouts with tokens, log-probabilities, versions, mask and reward."""

    def __init__(self):
        self.brevity = 1.0

    def step(self, batch):
        for rollout in batch:
            assert len(rollout.tokens) == len(rollout.logprobs) == len(rollout.versions) == len(rollout.mask)
        self.brevity *= 1.1
        return sum(rollout.reward for rollout in batch) / len(batch)

    def weights(self):
        return {"brevity": self.brevity}


if __name__ == "__main__":
    learner, metrics, draw = BrevityLearner(), Metrics(), LognormalLengths()
    engine = SimulatedEngine(
        slots=32,
        step_time=PRESETS["h200-8b"],
        # A resumed response only grows: its prefix never changes.
        length_of=lambda request: max(
            request.prefix_length + 1, int(draw(request.prompt, request.seed) / learner.brevity)
        ),
    )
    prompts = Prompts([Prompt(str(i), range(100), i) for i in range(640)])
    scorer = SimulatedScorer(engine, reward_of=lambda rollout: 1000.0 / len(rollout))
    schedule = Schedule(mode="partial+elevator", rollouts_per_update=32, prompts_per_cohort=128)
    controller = Controller(engine, prompts, scorer, schedule, log=EventLog(metrics))

    for batch in controller:  # scored, shortest first
        reward = learner.step(batch)
        controller.publish(learner.weights())  # version + 1; the engine continues under it
        if batch.update % 5 == 4:
            mean = batch.tokens / len(batch)
            print(f"update {batch.update + 1:2}  reward {reward:5.2f}  mean length {mean:6.0f}")

    totals = metrics.run_metrics()
    print(f"bubble {totals.bubble:.1%}, goodput {totals.goodput:,.0f} tok/s, staleness {totals.staleness_mean:.2f}")
