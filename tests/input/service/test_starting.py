"""A service that `start` makes, on this machine and on Ray."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg


def _numbers(service: sg.input.service.InputService) -> list[int]:
    distribute = sg.input.service.distribute("distributed_epoch", service.target, exactly_once=True)
    dataset = sg.input.Dataset(np.arange(90), batch_size=1).apply(distribute)
    return sorted(batch.item() for batch in dataset)


def test_workers_are_started_and_ended(monkeypatch) -> None:
    with sg.input.service.start(1) as service:
        assert service.num_workers == 1
        assert len(service.describe()["workers"]) == 1
        assert _numbers(service) == list(range(90))
    service.close()
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "1")
    with pytest.raises(sg.errors.UnavailableError, match="Input dispatcher"):
        sg.input.service.register_dataset(service.target, sg.input.Dataset([np.arange(2)]))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_ray_places_the_workers_and_starts_a_killed_one_again() -> None:
    with sg.input.service.start(2) as service:
        pids = service._workers.pids
        assert _numbers(service) == list(range(90))
        service._workers.kill(0)
        assert _numbers(service) == list(range(90))
        service._workers.add()
        assert service.num_workers == 3
        service._workers.remove()
        service._workers.remove()
        assert service.num_workers == 1
        assert _numbers(service) == list(range(90))
        assert pids[0] not in service._workers.pids


def test_the_number_of_workers_is_checked() -> None:
    with pytest.raises(ValueError, match="num_workers=0 is out of range"):
        sg.input.service.start(0)
