"""A line of a log is an event with all of its fields, or damage: it never ends the reader."""

import io
import random

import pytest

from sortedrl.core import Event, events
from sortedrl.log.lines import Damage, decoded_or_damage, written

LOG: list[Event] = [
    events.RunBegan(0.0, 4, "partial", {"mode": "partial"}),
    events.Loaded(0.1, 0, 0, 2, ("p0", "p1")),
    events.Loaded(0.1, 1, 2, 1, ("2",)),
    events.Loaded(0.1, 2, 3, 1, ('a "quoted" one',)),
    events.Submitted(0.1, 0, 0, 12, 0, 33.25),
    events.Started(0.1, 0, 3),
    events.TurnEnded(0.25, 0, 4, 4),
    events.Observed(0.25, 0, 2, 6),
    events.Finished(0.3, 0, 8, 8, True),
    events.Finished(123456.78901234567, 10, 8, 80, False),
    events.Aborted(0.3, 1, 5, 5, 0),
    events.Scored(0.4, 0, -1.5),
    events.Scored(0.4, 1, 1e-07),
    events.Rejected(0.4, 1, 0, '{"event":"Started","at":1.5,"rollout":0,"slot":3}\n'),
    events.Updated(0.5, 0, 0, 2, (0,), (8,), (-1.5,), (((0, 3), (2, 5)),), (1,)),
]


def decoded(text: str) -> list[Event | Damage]:
    return [decoded_or_damage(number, line) for number, line in enumerate(io.StringIO(text, newline="\n"), 1)]


def test_an_intact_log_is_decoded_as_it_was_written() -> None:
    assert decoded(written(LOG)) == LOG


@pytest.mark.parametrize(
    "line",
    [
        '{"event":"Started","at":1.5,"rollout":0}',
        '{"event":"Started","at":1.5,"rollout":0.5,"slot":3}',
        '{"event":"Started","at":1.5,"rollout":07,"slot":3}',
        '{"event":"Started","at":1.5,"rollout":,"slot":3}',
        '{"event":"Started"5,"at":1.5,"rollout":0,"slot":3}',
        '{"event":"Started","at":1.5,"rollout":0,"slot":3}5',
        '{"event":"Started","at":' + 400 * "9" + '.5,"rollout":0,"slot":3}',
        '{"event":"Phase","at":' + 400 * "9" + ',"phase":"harvest"}',
        '{"event":"Started","at":1.5,"rollout":' + 5_000 * "9" + ',"slot":3}',
        '{"event":"Finished","at":1.5,"rollout":0,"made":1,"length":1,"truncated":fal5se}',
        '{"event":"Finished","at":1.5,"rollout":0,"made":1,"length":1,"truncated":1}',
        '{"event":"Loaded","at":1.5,"cohort":1,"first":1,"rollouts":1,"prompts":[1]}',
        '{"event":"Loaded","at":1.5,"cohort":1,"first":1,"rollouts":1,"prompts":"1"}',
        '{"event":"Updated","at":0.5,"update":0,"harvest":0,"version":2,"rollouts":[0],"lengths":[8],"rewards":[1],'
        '"segments":[[5]],"waited":[1]}',
        '{"event":"Updated","at":1.0,"update":0,"harvest":0,"version":0,"rollouts":[1],"lengths":[2,3],"rewards":[1.0],'
        '"segments":[[[0,2]]],"waited":[0]}',
        '{"event":"Updated","at":1.0,"update":0,"harvest":0,"version":0,"rollouts":[],"lengths":[],"rewards":[],'
        '"segments":[],"waited":[]}',
        '{"event":"RunBegan","at":1.0,"slots":0,"mode":"partial","settings":{},"format":2,"gated":false}',
        '{"event":"RunBegan","at":1.0,"slots":1,"mode":"partial","settings":{"rollouts_per_prompt":0},"format":2}',
        '{"event":"SlotsChanged","at":1.0,"slots":1000000000000}',
        '{"event":"Loaded","at":1.0,"cohort":1,"first":1,"rollouts":1000000000000,"prompts":["a"]}',
        '{"event":"Loaded","at":1.0,"cohort":1,"first":-8,"rollouts":8,"prompts":["a"]}',
        '{"event":"Phase","at":"late","phase":"harvest"}',
        '{"event":"Phase","at":NaN,"phase":"harvest"}',
        '{"event":"Nonsense","at":1.0}',
        "[1,2]",
        "",
    ],
)
def test_a_line_with_a_wrong_value_is_damage(line: str) -> None:
    found = decoded(f"{written(LOG)}{line}\n{written(LOG)}")
    damage = found[len(LOG)]
    assert isinstance(damage, Damage) and damage.line == 1 + len(LOG)
    assert found[: len(LOG)] == found[len(LOG) + 1 :] == LOG


def test_random_damage_is_found_or_leaves_an_event_that_can_be_written_again() -> None:
    rng = random.Random(0)
    differing = 0
    for _ in range(4_000):
        text = written(rng.choices(LOG))
        for _ in range(rng.randint(1, 2)):
            place = rng.randrange(len(text))
            text = text[:place] + rng.choice(["", *'0159-.,:"{}[]et \x00é']) + text[place + rng.randint(0, 1) :]
        found = decoded_or_damage(1, text)
        differing += isinstance(found, Damage)
        assert isinstance(found, Damage) or decoded(written([found])) == [found]
    assert 1_000 < differing < 4_000
