"""SortedRL's partial mode without any abstraction: cohorts, harvests, resumes. It needs nothing of the package.

A response is a number of tokens still to generate; one step of the "engine" generates one token per slot. Run it:

    python examples/the_loop_in_100_lines.py

It prints the fraction of empty slot-time (the bubble) and the token staleness of the baseline and of partial mode on
the same lengths.
"""

import random

SLOTS, PER_UPDATE, PER_COHORT, COHORTS = 32, 32, 128, 6


def draw_lengths(seed):
    rng = random.Random(seed)
    return [max(4, min(2000, round(rng.lognormvariate(5, 1)))) for _ in range(PER_COHORT * COHORTS)]


def baseline(lengths):
    """Generate one update's rollouts, wait for the longest, train, repeat."""
    empty = steps = 0
    for first in range(0, len(lengths), PER_UPDATE):
        batch = lengths[first : first + PER_UPDATE]
        steps += max(batch)
        empty += sum(max(batch) - length for length in batch)
    return empty / (steps * SLOTS), 0.0, [PER_UPDATE] * (len(lengths) // PER_UPDATE)


def partial(lengths):
    """Oversubscribe, abort when an update is ready, keep the tokens, resume them first. A cohort is trained on before
    the next one is loaded, so no rollout starves."""
    version = empty = steps = 0
    ages, updates = [], []
    for cohort in range(COHORTS):
        # Rollout: [length, tokens made, [(version, tokens), ...]]
        rollouts = [[n, 0, []] for n in lengths[cohort * PER_COHORT : (cohort + 1) * PER_COHORT]]
        waiting, ready, untrained = rollouts[:], [], len(rollouts)
        while untrained:
            need = min(PER_UPDATE, untrained)
            waiting.sort(key=lambda r: -r[1])  # resumable first, most cached tokens first
            running, began = [], {}
            while len(ready) < need:  # the harvest
                while waiting and len(running) < SLOTS:  # refill free slots immediately
                    running.append(waiting.pop(0))
                    began[id(running[-1])] = running[-1][1]
                steps += 1
                empty += SLOTS - len(running)
                for rollout in running:
                    rollout[1] += 1
                finished = [r for r in running if r[1] == r[0]]
                running = [r for r in running if r[1] < r[0]]
                for rollout in finished:
                    rollout[2].append((version, rollout[1] - began[id(rollout)]))
                ready += finished
            for rollout in running:  # abort the others: keep their tokens with their version
                rollout[2].append((version, rollout[1] - began[id(rollout)]))
            waiting = running + waiting
            ready.sort(key=lambda r: r[0])
            batch, ready = ready[:need], ready[need:]
            ages += [(version - v, n) for _, _, segments in batch for v, n in segments]
            updates.append(sum(r[0] for r in batch) / len(batch))
            untrained -= len(batch)
            version += 1  # here the learner steps and publishes its weights
    staleness = sum(age * n for age, n in ages) / sum(n for _, n in ages)
    return empty / (steps * SLOTS), staleness, updates


if __name__ == "__main__":
    lengths = draw_lengths(seed=0)
    for schedule in (baseline, partial):
        bubble, staleness, updates = schedule(lengths)
        print(f"{schedule.__name__:9} bubble {bubble:.1%}  token staleness {staleness:.2f}  updates {len(updates)}")
    print("mean length of the first cohort's updates:", [round(length) for length in partial(lengths)[2][:4]])
