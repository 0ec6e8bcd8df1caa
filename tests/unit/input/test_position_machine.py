"""Positions of iterators, taken and set in any order, beside a list of what there is to read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import stratagem as sg

EXAMPLES, BATCH = 13, 4
EPOCHS = 5
STRATEGIES = {
    "one device": lambda: sg.OneDeviceStrategy("cpu:0"),
    "three replicas": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
}


def parts_of(strategy: Any, batch: Any) -> list[list[int]]:
    return [part.tolist() for part in strategy.local_results(batch)]


def shuffled(strategy: Any) -> Any:
    rows = np.arange(EXAMPLES)
    return strategy.distribute_dataset(
        sg.input.Dataset(rows, batch_size=BATCH, shuffle=True, seed=1)
    )


class Positions(RuleBasedStateMachine):
    """`place` is the epoch and the step that come next."""

    kind = "one device"

    @initialize()
    def begin(self) -> None:
        self.strategy = STRATEGIES[self.kind]()
        whole = shuffled(self.strategy)
        self.epochs = [[parts_of(self.strategy, one) for one in whole] for _ in range(EPOCHS)]
        for epoch in self.epochs:  # each example once, in another order each time
            seen = [number for step in epoch for part in step for number in part]
            assert sorted(seen) == list(range(EXAMPLES))
        assert self.epochs[0] != self.epochs[1]
        self.dataset = shuffled(self.strategy)
        self.iterator = iter(self.dataset)
        self.place = (0, 0)
        self.states: list[tuple[str, tuple[int, int]]] = []

    @precondition(lambda self: self.place[0] < EPOCHS - 1)
    @rule()
    def read(self) -> None:
        epoch, step = self.place
        batch = next(self.iterator, None)
        if step == len(self.epochs[epoch]):
            assert batch is None
            self.iterator, self.place = iter(self.dataset), (epoch + 1, 0)
        else:
            assert parts_of(self.strategy, batch) == self.epochs[epoch][step]
            self.place = (epoch, step + 1)

    @rule()
    def take_the_position(self) -> None:
        self.states.append((json.dumps(self.iterator.get_state()), self.place))

    @precondition(lambda self: self.states)
    @rule(data=st.data(), is_new=st.booleans())
    def set_a_position(self, data: st.DataObject, is_new: bool) -> None:
        state, self.place = data.draw(st.sampled_from(self.states))
        if is_new:  # as in another process
            self.iterator.close()
            self.dataset = shuffled(self.strategy)
            self.iterator = iter(self.dataset)
        self.iterator.set_state(json.loads(state))

    def teardown(self) -> None:
        self.iterator.close()


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("examples", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_positions_are_places_in_a_list(kind: str, examples: int) -> None:
    machine = type("Positions", (Positions,), {"kind": kind})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=40)
    )
