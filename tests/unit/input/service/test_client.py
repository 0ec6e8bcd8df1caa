"""Positions of consumers: a job resumes at the batches that none of them has returned."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from tests.unit.input.service.servers import LIMIT_S, bucketed, coordinated, input_servers, values


@pytest.fixture(scope="module")
def servers():
    with input_servers(2) as servers:
        yield servers


@pytest.mark.slow
def test_the_position_of_an_iterator_is_what_it_returned(servers) -> None:
    dataset = sg.input.Dataset(np.arange(200), batch_size=1, shuffle=True)
    distributed = servers.distribute(dataset, exactly_once=True)
    source = distributed.as_source()
    for num_read in (0, 1, 57, 199, 200):
        reader = source.open(3)
        before = [next(reader).item() for _ in range(num_read)]
        state = json.loads(json.dumps(reader.state()))
        reader.close()
        again = source.open(3)
        again.restore(state)
        after = [batch.item() for batch in again]
        assert sorted(before + after) == list(range(200))


def test_consumers_of_a_job_resume_together(servers) -> None:
    dataset = sg.input.Dataset(np.arange(120), batch_size=1)

    def source():
        return servers.distribute(dataset, job_name="resumed", exactly_once=True).as_source()

    readers = [source().open(0) for _ in range(2)]
    before: list[int] = []
    for reader in readers:  # both have joined before their states are taken
        before.append(next(reader).item())
    for number in range(50):
        before.append(next(readers[number % 2]).item())
    _wait_for_two_consumers(readers)
    states = [json.loads(json.dumps(reader.state())) for reader in readers]
    late = [next(readers[0]).item() for _ in range(3)]  # not in the states
    after: list[list[int]] = [[], []]

    def resume(number: int) -> None:
        reader = source().open(0)
        reader.restore(states[number])
        after[number] = [batch.item() for batch in reader]

    threads = [threading.Thread(target=resume, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(before + after[0] + after[1]) == list(range(120))
    assert set(late) <= set(after[0] + after[1])
    with pytest.raises(sg.errors.UnavailableError, match="resumed the job from a state"):
        list(readers[0])
    readers[1].close()


def _wait_for_two_consumers(readers: Any) -> None:
    for reader in readers:
        consumer = reader._consumer
        with consumer.changed:
            assert consumer.changed.wait_for(
                lambda view=consumer: view._view["num_consumers"] == 2, LIMIT_S
            )


def test_coordinated_consumers_resume_at_the_next_step(servers) -> None:
    dataset = bucketed(6, [4, 3, 2, 1, 5, 6])
    whole = coordinated(servers, dataset, "not interrupted")
    states: list[Any] = [None, None]
    parts: list[list[Any]] = [[], []]

    def read(index: int, count: int | None) -> None:
        source = servers.distribute(
            dataset, job_name="interrupted", consumer_index=index, num_consumers=2
        ).as_source()
        reader = source.open(0)
        reader.restore(states[index])
        for _ in range(1000 if count is None else count):
            batch = next(reader, None)
            if batch is None:
                break
            parts[index].append(batch)
        states[index] = json.loads(json.dumps(reader.state()))
        reader.close()

    for count in (5, 3, None):
        threads = [threading.Thread(target=read, args=(index, count)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    found = list(zip(*parts, strict=True))
    assert [values(step) for step in found] == [values(step) for step in whole]
