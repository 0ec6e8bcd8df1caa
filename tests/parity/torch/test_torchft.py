"""Local updates against torchft's own, which `torchft_reference.py` has recorded.

Both start from the same weights, and see the same examples in the same order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from tests.parity.torch.problem import NUM_STEPS, OVERLAP, OWN_SHARE, PERIOD, STREAMED_STEPS
from tests.parity.torch.training import Trained, adam, local, sgd_with_momentum, train

_RECORDED = np.load(Path(__file__).parent / "recorded_torchft.npz")
_TOLERANCE = 2e-5  # of a loss or a weight
_METHODS = ("local_sgd", "diloco", "streaming_diloco")


def _streamed(*, own_share: float = OWN_SHARE, overlap: int = OVERLAP) -> Trained:
    method = sg.local_updates.StreamingDiLoCo(
        period=PERIOD, fragments=2, overlap=overlap, own_share=own_share
    )
    return train(local(method), adam, slice(STREAMED_STEPS))


def _trained(name: str) -> Trained:
    if name == "local_sgd":
        method = sg.local_updates.LocalSGD(period=PERIOD)
        return train(local(method), sgd_with_momentum, slice(NUM_STEPS))
    if name == "diloco":
        return train(local(sg.local_updates.DiLoCo(period=PERIOD)), adam, slice(NUM_STEPS))
    return _streamed()


@pytest.mark.parametrize("name", _METHODS)
def test_losses_and_weights_are_those_of_torchft(name: str) -> None:
    in_losses, in_weights = _trained(name).differences(_RECORDED, name)
    print(f"{name}: losses differ by {in_losses:.1e} at most, weights by {in_weights:.1e}")
    assert max(in_losses, in_weights) < _TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"own_share": 0.0}, {"overlap": 1}], ids=str)
def test_other_settings_of_streaming_differ_by_more(other: dict[str, Any]) -> None:
    in_losses, _ = _streamed(**other).differences(_RECORDED, "streaming_diloco")
    assert in_losses > 10 * _TOLERANCE


def test_the_recorded_methods_differ_from_each_other_by_more() -> None:
    ends = [_RECORDED[f"{name}/weights 0"] for name in _METHODS]
    for place, one in enumerate(ends):
        for other in ends[place + 1 :]:
            assert np.abs(one - other).max() > 10 * _TOLERANCE
