"""Models of the first step: their parameters, counted by hand, in Keras and in PyTorch."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest

from benchmarks.cases import Environments
from benchmarks.first_step.cases import HEAVY
from benchmarks.workers.keras_models import build_model
from benchmarks.workloads import WORKLOADS

# Attention has four projections of 256 x 256, and biases; the feed-forward layers are 1024 wide.
_NORM = 2 * 256
_BLOCK = 4 * (256 * 256 + 256) + 2 * 256 * 1024 + 1024 + 256 + 2 * _NORM
_EMBEDDING = (5000 + 64) * 256
NUM_PARAMETERS = {
    "bert": _EMBEDDING + _NORM + 12 * _BLOCK + (256 * 256 + 256) + (256 * 10 + 10),
    "gpt2": _EMBEDDING + 12 * _BLOCK + _NORM + 256 * 5000,
    # keras.io/api/applications; 53,120 statistics of batch normalization are not trained.
    "small_resnet50": 25_636_712 - 53_120,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("bert", marks=pytest.mark.slow),
        "gpt2",
        pytest.param("small_resnet50", marks=pytest.mark.slow),
    ],
)
def test_keras_has_so_many_parameters(name: str) -> None:
    model = build_model(name)
    assert model.built
    assert sum(int(np.prod(v.shape)) for v in model.trainable_variables) == NUM_PARAMETERS[name]
    assert model.input_shape[1:] == WORKLOADS[name].input_shape
    assert {v.dtype for v in model.trainable_variables} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEAVY)
def test_torch_has_as_many_and_the_same_shape_of_logits(name: str) -> None:
    peers = Environments().peers
    if not peers.is_file():
        pytest.skip("no environment of the peers")
    program = (
        "import torch\n"
        "from benchmarks.workers.torch_models import build_model\n"
        "from benchmarks.workloads import WORKLOADS\n"
        f"model, (x, y) = build_model('{name}'), WORKLOADS['{name}'].batch()\n"
        "x = torch.from_numpy(x)\n"
        "x = x.permute(0, 3, 1, 2) if x.ndim == 4 else x\n"
        "print(sum(p.numel() for p in model.parameters()), *model(x).shape)\n"
    )
    command = [str(peers), "-c", program]
    told = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    count, *shape = (int(text) for text in told.stdout.split())
    assert count == NUM_PARAMETERS[name]
    assert shape == list(build_model(name).compute_output_shape((8, *WORKLOADS[name].input_shape)))


@pytest.mark.slow
def test_decoder_sees_no_later_token() -> None:
    model = build_model("gpt2")
    tokens, _ = WORKLOADS["gpt2"].batch()
    changed = tokens.copy()
    changed[:, 40:] = 0
    before, after = (np.asarray(model(x)) for x in (tokens, changed))
    np.testing.assert_allclose(before[:, :40], after[:, :40], atol=1e-5)
    assert np.abs(before[:, 40:] - after[:, 40:]).max() > 0.1


@pytest.mark.slow
def test_encoder_sees_the_order_of_tokens() -> None:
    model = build_model("bert")
    tokens, _ = WORKLOADS["bert"].batch()
    swapped = np.concatenate([tokens[:, :1], tokens[:, :0:-1]], axis=1)
    before, after = (np.asarray(model(x)) for x in (tokens, swapped))
    assert np.abs(before - after).max() > 1e-3
