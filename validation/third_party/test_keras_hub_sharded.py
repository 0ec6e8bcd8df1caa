"""KerasHub's decoders with state sharded over eight devices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np
import pytest

import stratagem as sg
from validation.third_party.comparison import Numbers, assert_like_plain_keras
from validation.third_party.programs.keras_hub_sharded import (
    PROGRAMS,
    compile_decoder,
    make_decoder,
    rows,
)

_DEVICES = [f"cpu:{index}" for index in range(8)]
# Logits are about 7. Each replica rounds its sums of gradients to bfloat16 before they are added.
_TOLERANCE, _BFLOAT16_TOLERANCE = 1e-4, 5e-3
_QUICK = ("llama", "gemma, LoRA on int8")


def _assert_equal(shard_state: str, name: str, expected: Numbers) -> None:
    strategy = sg.MirroredStrategy(_DEVICES, shard_state=shard_state)
    tolerance = _BFLOAT16_TOLERANCE if name.endswith("bfloat16") else _TOLERANCE
    assert_like_plain_keras(PROGRAMS[name], strategy, expected, tolerance=tolerance)


@pytest.mark.parametrize("name", PROGRAMS)
def test_decoder_with_all_state_sharded_equals_plain_keras(
    plain: Mapping[str, Numbers], name: str
) -> None:
    _assert_equal("all", name, plain[name])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in PROGRAMS],
)
def test_decoder_with_sharded_optimizer_state_equals_plain_keras(
    plain: Mapping[str, Numbers], name: str
) -> None:
    _assert_equal("optimizer", name, plain[name])


def _plain_logits(path: Path) -> np.ndarray:
    output = path.with_suffix(".npy")
    command = [sys.executable, "-m", "validation.third_party.open_decoder", str(path), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return np.load(output)


def test_saved_shards_open_on_fewer_devices_and_in_plain_keras(tmp_path: Path) -> None:
    inputs, labels, weights = rows()
    with sg.MirroredStrategy(_DEVICES, shard_state="all").scope():
        model = compile_decoder(make_decoder("llama"))
    model.fit(inputs, labels, sample_weight=weights, batch_size=8, shuffle=False, verbose=0)
    path = tmp_path / "decoder.keras"
    model.save(path)
    expected = model.predict(inputs, verbose=0)
    np.testing.assert_allclose(_plain_logits(path), expected, rtol=_TOLERANCE, atol=_TOLERANCE)
    four = sg.MirroredStrategy(_DEVICES[:4], shard_state="all")
    for strategy in (four, sg.OneDeviceStrategy("cpu:0")):
        with strategy.scope():
            opened = keras.saving.load_model(path)
        logits = opened.predict(inputs, verbose=0)
        np.testing.assert_allclose(logits, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
        saved, read = model.get_weights(), opened.get_weights()
        assert all(map(np.array_equal, saved, read))
