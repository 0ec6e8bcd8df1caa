"""Names of tf.distribute.experimental."""

from __future__ import annotations

import pytest

import stratagem as sg


def test_names_are_those_without_the_prefix() -> None:
    names = [name for name in dir(sg.experimental) if name != "MultiWorkerMirroredStrategy"]
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
    with pytest.raises(ValueError, match="implementation='STAR' is not known"):
        sg.experimental.MultiWorkerMirroredStrategy("STAR")
