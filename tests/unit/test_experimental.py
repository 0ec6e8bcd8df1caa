"""Names of tf.distribute.experimental."""

from __future__ import annotations

import pytest

import stratagem as sg


def test_names_are_those_without_the_prefix() -> None:
    of_their_own = {"MultiWorkerMirroredStrategy", "TPUStrategy"}
    names = sorted(set(dir(sg.experimental)) - of_their_own)
    assert "CommunicationOptions" in names
    for name in names:
        assert getattr(sg.experimental, name) is getattr(sg, name)
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchName'"):
        _ = sg.experimental.NoSuchName


def test_strategy_takes_the_algorithm_first() -> None:
    hierarchical = sg.experimental.CommunicationImplementation.HIERARCHICAL
    strategy = sg.experimental.MultiWorkerMirroredStrategy(hierarchical)
    assert isinstance(strategy, sg.MultiWorkerMirroredStrategy)
    assert strategy.communication_options.implementation is hierarchical
    options = sg.CommunicationOptions(bytes_per_pack=5)
    given = sg.experimental.MultiWorkerMirroredStrategy(communication_options=options)
    assert given.communication_options is options
    with pytest.raises(ValueError, match="implementation='STAR' is not a known algorithm"):
        sg.experimental.MultiWorkerMirroredStrategy("STAR")


def test_chips_take_the_assignment_second(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_TPU_PLATFORM", "cpu")
    topology = sg.tpu.experimental.initialize_tpu_system()
    assignment = sg.tpu.experimental.DeviceAssignment.build(topology, num_replicas=2)
    strategy = sg.experimental.TPUStrategy(None, assignment, steps_per_run=4)
    assert isinstance(strategy, sg.TPUStrategy)
    assert (strategy.num_replicas_in_sync, strategy.steps_per_run) == (2, 4)
    with pytest.raises(ValueError, match="tpu_cluster_resolver='local' is of type str"):
        sg.experimental.TPUStrategy("local")
