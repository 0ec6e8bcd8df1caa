"""A strategy in a task that does not train is an error at every entry, and names the task."""

from __future__ import annotations

import json

import numpy as np
import pytest

import stratagem as sg


@pytest.fixture
def strategy(monkeypatch) -> sg.ParameterServerStrategy:
    jobs = ("chief", "ps", "worker")
    cluster = {job: [f"127.0.0.1:{port}"] for port, job in enumerate(jobs, start=1)}
    text = json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 0}})
    monkeypatch.setenv("TF_CONFIG", text)
    return sg.ParameterServerStrategy()


def test_every_entry_is_refused(strategy) -> None:
    message = "was used in ps 0, which does not train"
    batches = iter(strategy.distribute_dataset([np.arange(2)]))
    with pytest.raises(RuntimeError, match=message), strategy.scope():
        pass
    with pytest.raises(RuntimeError, match=message):
        strategy.run(lambda: 1)
    with pytest.raises(RuntimeError, match=message):
        strategy.run_steps(np.sum, batches, 1)
    with pytest.raises(RuntimeError, match=message):
        sg.coordinator.ClusterCoordinator(strategy)
    assert sg.get_strategy() is not strategy
