"""Presets of KerasHub: read into shards, written from them, and opened with other devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import keras_hub
import numpy as np
import pytest

import stratagem as sg

_SIZES = {
    "vocabulary_size": 1024,
    "num_layers": 1,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 512,
    "intermediate_dim": 256,
}
_LARGE_BYTES = 2**20


def _opened(folder: Path, num_devices: int) -> Any:
    devices = [f"cpu:{index}" for index in range(num_devices)]
    with sg.MirroredStrategy(devices, shard_state="all").scope():
        return keras_hub.models.LlamaCausalLM.from_preset(str(folder), preprocessor=None)


def _values(model: Any) -> dict[str, np.ndarray]:
    return {one.path: np.asarray(one.value) for one in model.weights}


def test_preset_goes_into_shards_and_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = keras_hub.models.LlamaBackbone(**_SIZES)
    plain = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
    plain.save_to_preset(str(tmp_path / "plain"))
    sent: list[Any] = []
    put = jax.device_put
    monkeypatch.setattr(
        jax, "device_put", lambda one, *to, **how: sent.append(one) or put(one, *to, **how)
    )
    model = _opened(tmp_path / "plain", 8)
    monkeypatch.undo()
    large = [one for one in sent if getattr(one, "nbytes", 0) >= _LARGE_BYTES]
    assert not large  # neither copies on all devices nor wholes
    table = model.backbone.token_embedding.embeddings
    assert table.stored.sharding.shard_shape(table.shape)[0] == table.shape[0] / 8
    expected = _values(plain)
    model.save_to_preset(str(tmp_path / "sharded"))
    again = keras_hub.models.LlamaCausalLM.from_preset(str(tmp_path / "sharded"), preprocessor=None)
    for one in (model, again, *(_opened(tmp_path / "sharded", count) for count in (4, 1))):
        values = _values(one)
        assert values.keys() == expected.keys()
        assert all(np.array_equal(values[path], expected[path]) for path in values)
