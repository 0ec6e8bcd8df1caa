"""Positions of iterators, taken and set in any order and in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
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


# A loop interrupted within an epoch resumes in another process with the next example.


_PROGRAM = """
import json, pathlib, sys
import grain
import numpy as np
import stratagem as sg

kind, file, num_steps = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])

examples = np.arange(33)
source = {
    "arrays": lambda: sg.input.Dataset(examples, batch_size=5, shuffle=True, seed=1),
    "grain workers": lambda: grain.MapDataset.source(examples).shuffle(1).to_iter_dataset()
        .batch(5).mp_prefetch(grain.MultiprocessingOptions(num_workers=2)),
}[kind]()

if __name__ == "__main__":
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.distribute_dataset(source)
    iterator = iter(dataset)
    if file.exists():
        iterator.set_state(json.loads(file.read_text()))
    seen = []
    while len(seen) < num_steps:
        batch = next(iterator, None)
        if batch is None:
            iterator = iter(dataset)
            continue
        seen.append([part.tolist() for part in strategy.local_results(batch)])
    file.write_text(json.dumps(iterator.get_state()))
    iterator.close()
    print(json.dumps(seen))
"""


def _run(program: Path, kind: str, file: Path, num_steps: int) -> list[list[list[int]]]:
    finished = subprocess.run(
        [sys.executable, str(program), kind, str(file), str(num_steps)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "grain workers"])
def test_another_process_resumes_with_the_next_example(kind: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    undisturbed = _run(program, kind, tmp_path / "whole.json", 18)  # two epochs and a half
    parts = [_run(program, kind, tmp_path / "parts.json", n) for n in (3, 15)]
    assert parts[0] + parts[1] == undisturbed
    examples = [n for step in undisturbed for part in step for n in part]
    assert sorted(examples[:33]) == sorted(examples[33:66]) == list(range(33))
