"""Lines that are decoded together give what each of them gives by itself, however they are damaged."""

from __future__ import annotations

import random

import pytest

from sortedrl.core import Event, events
from sortedrl.log.decoder import decoded_text
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


def line_by_line(text: str, first_line: int = 1) -> list[Event | Damage]:
    lines = text.split("\n")
    whole, torn = [f"{line}\n" for line in lines[:-1]], lines[-1:] if lines[-1] else []
    return [decoded_or_damage(number, line) for number, line in enumerate([*whole, *torn], start=first_line)]


def test_an_intact_log_is_decoded_as_it_was_written() -> None:
    assert decoded_text(written(LOG)) == LOG
    assert decoded_text("") == []


@pytest.mark.parametrize(
    "line",
    [
        '{"event":"Started","at":1.5,"rollout":0}',
        '{"event":"Started","at":1.5,"rollout":0,"slot":3,"slot":4}',
        '{"event":"Started","at":1.5,"slot":3,"rollout":0}',
        '{"event":"Started","at":1,"rollout":0,"slot":3}',
        '{"event":"Started","at":1.5,"rollout":0.5,"slot":3}',
        '{"event":"Started","at":1.5,"rollout":07,"slot":3}',
        '{"event":"Started","at":1.5,"rollout":-0,"slot":3}',
        '{"event":"Started","at":1.5,"rollout":,"slot":3}',
        '{"event":"Started"5,"at":1.5,"rollout":0,"slot":3}',
        '{"event":"Started5","at":1.5,"rollout":0,"slot":3}',
        '{"event":"Started","at":1.5,"rol5lout":0,"slot":3}',
        '{"event":"Started","at":1.5,"rollout"5:0,"slot":3}',
        '{"event":"Started","at":1.5,"rollout":0,"slot":3}5',
        '{"event":"Started","at":' + 400 * "9" + '.5,"rollout":0,"slot":3}',
        '{"event":"Phase","at":' + 400 * "9" + ',"phase":"harvest"}',
        '{"event":"Started","at":1.5,"rollout":' + 5_000 * "9" + ',"slot":3}',
        '{"event":"Finished","at":1.5,"rollout":0,"made":1,"length":1,"truncated":fal5se}',
        '{"event":"Finished","at":1.5,"rollout":0,"made":1,"length":1,"trun5cated":false}',
        '{"event":"Finished","at":1.5,"rollout":0,"made":1,"length":1,"truncated":1}',
        '{"event":"Finished","at":1.5,"rollout":0,"made":1,"length":1,"truncated":}',
        '{"event":"Loaded","at":01.5,"cohort":1,"first":1,"rollouts":1,"prompts":["1"]}',
        '{"event":"Loaded","at":1.5,"cohort":1,"first":1,"rollouts":1,"prompts":[1]}',
        '{"event":"Loaded","at":1.5,"cohort":1,"first":1,"rollouts":1,"prompts":"1"}',
        '{"event":"Loaded","at":1.5,"cohort":1,"first":1,"rollouts":1,"prompts":["\\u0031"]}',
        '{"event":"Updated","at":0.5,"update":0,"harvest":0,"version":2,"rollouts":[0],"lengths":[8],"rewards":[1],'
        '"segments":[[5]],"waited":[1]}',
        "",
    ],
)
def test_a_line_among_others_is_what_it_is_alone(line: str) -> None:
    text = f"{written(LOG)}{line}\n{written(LOG)}"
    assert repr(decoded_text(text, 7)) == repr(line_by_line(text, 7))
    assert repr(decoded_text(f"{text}{line}")) == repr(line_by_line(f"{text}{line}"))


def test_random_damage_is_the_same_together_and_alone() -> None:
    rng = random.Random(0)
    numbers = [event for event in LOG if len(written([event])) < 100 and not isinstance(event, events.Rejected)]
    differing = 0
    for _ in range(4_000):
        text = written(rng.choices(numbers, k=2))
        for _ in range(rng.randint(1, 2)):
            place = rng.randrange(len(text))
            text = text[:place] + rng.choice(["", *'0159-.,:"{}[]e\nt \x00é']) + text[place + rng.randint(0, 1) :]
        expected = line_by_line(text)
        assert repr(decoded_text(text)) == repr(expected), text
        differing += any(isinstance(line, Damage) for line in expected)
    assert 1_000 < differing < 4_000
