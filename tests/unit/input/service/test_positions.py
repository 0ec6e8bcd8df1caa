"""Positions of a consumer: small while it has whole splits, and the same after JSON."""

from __future__ import annotations

import json
import random

from stratagem.input.service.consumer import ConsumerPosition
from stratagem.input.service.job import EVERY_NUMBER, NumberRanges


def _state(position: ConsumerPosition) -> dict:
    return json.loads(json.dumps(position.state(num_consumers=1, num_lanes=None)))


def test_whole_splits_become_ranges_of_splits() -> None:
    position, chance = ConsumerPosition(), random.Random(0)
    lengths = [chance.randrange(5) for _ in range(200)]
    for split, length in enumerate(lengths):
        events = [(split, index) for index in range(length)] + [(split, None)]
        chance.shuffle(events)  # the length may be known before the last batch is returned
        for _, index in events:
            if index is None:
                position.note_length(split, length)
            else:
                position.add(split, index)
    position.add(200, 1)
    state = _state(position)
    assert state["done"] == [[0, 200]]
    assert state["parts"] == {"200": [[1, 2]]}
    assert _state(ConsumerPosition(state)) == state
    assert position.numbers_of(3) == NumberRanges([EVERY_NUMBER])
    assert position.numbers_of(200).as_json() == [[1, 2]]
    assert position.numbers_of(201).as_json() == []


def test_splits_that_others_share_keep_their_parts() -> None:
    position = ConsumerPosition()
    for index in (0, 2):
        position.add(0, index)
    position.note_length(0, 4)
    assert _state(position)["parts"] == {"0": [[0, 1], [2, 3]]}
    position.pass_split(0)
    assert _state(position)["passed"] == [[0, 1]]
    assert _state(position)["parts"] == {}
    assert position.numbers_of(0).as_json() == [[0, 1], [2, 3]]


def test_only_the_last_passed_splits_are_remembered_with_their_batches() -> None:
    position = ConsumerPosition()
    for split in range(1000):
        position.add(split, 0)
        position.pass_split(split)
    assert position.numbers_of(0).as_json() == []
    assert position.numbers_of(999).as_json() == [[0, 1]]
    assert _state(position)["passed"] == [[0, 1000]]
