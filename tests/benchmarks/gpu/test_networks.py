"""Models of the GPU benchmarks: parameters counted by hand, and equal outputs in PyTorch."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from benchmarks.cases import Environments
from benchmarks.gpu.models import MODELS, model_of
from benchmarks.gpu.workers.keras_networks import build_model

_WIDTH, _LENGTH, _TOKENS = 64, 16, 100
_NORM = 2 * _WIDTH
_BLOCK = 12 * _WIDTH**2 + (3 + 1 + 4 + 1) * _WIDTH + 2 * _NORM
_BODY = (_TOKENS + _LENGTH) * _WIDTH + 2 * _BLOCK + _NORM
_NUM_PARAMETERS = {"bert": _BODY + _WIDTH**2 + _WIDTH + 2 * _WIDTH + 2, "gpt": _BODY}


def _build(name: str) -> keras.Model:
    return build_model(model_of(name, is_tiny=True), is_mixed=False)


@pytest.mark.parametrize("name", [pytest.param("bert", marks=pytest.mark.slow), "gpt"])
def test_parameters(name: str) -> None:
    count = sum(int(np.prod(one.shape)) for one in _build(name).trainable_variables)
    assert count == _NUM_PARAMETERS[name]


def test_flops_of_a_step_of_the_gpt() -> None:
    # nanoGPT's estimate, with the position embedding left out, of 24 blocks of width 1,024.
    num_parameters = 50304 * 1024 + 1024 * 1024 + 24 * (12 * 1024**2 + 13 * 1024) + 2 * 1024
    per_token = 6 * (num_parameters - 1024 * 1024) + 12 * 24 * 1024 * 1024
    assert MODELS["gpt"].flops_per_step(num_parameters) == 8 * 1024 * per_token
    assert MODELS["mlp"].flops_per_step(1) is None


def test_flops_of_a_step_of_the_llamas() -> None:
    # Llama 3.2 1B has 1,235,814,400 numbers, 3B 3,212,749,824: the embedding is in the product.
    for name, count, width, blocks in (
        ("llama1b", 1_235_814_400, 2048, 16),
        ("llama3b", 3_212_749_824, 3072, 28),
    ):
        per_token = 6 * count + 12 * blocks * width * 2048
        assert MODELS[name].flops_per_step(0) == MODELS[name].units_per_step * per_token
    # Llama 3 8B has 8,030,261,248; one of its two embeddings is only looked up. LoRA of rank 8.
    frozen = 8_030_261_248 - 128_256 * 4096
    lora = 32 * 8 * (4096 + 4096 + 4096 + 1024)
    per_token = 4 * frozen + 6 * lora + 12 * 32 * 4096 * 2048
    assert MODELS["llama8b-lora"].flops_per_step(0) == 4 * 2048 * per_token


@pytest.mark.slow
def test_gpt_sees_no_later_token() -> None:
    network, (tokens, _) = _build("gpt"), model_of("gpt", is_tiny=True).arrays()
    before = tokens[:2]
    changed = before.copy()
    changed[:, 10:] = 0
    first, second = (np.asarray(network(one)) for one in (before, changed))
    np.testing.assert_allclose(first[:, :10], second[:, :10], atol=1e-5)
    assert np.abs(first[:, 10:] - second[:, 10:]).max() > 1e-2


def test_ids_of_dlrm_stay_in_their_tables() -> None:
    model = model_of("dlrm", is_tiny=True)
    (dense, ids), labels = model.arrays()
    assert dense.shape[0] == ids.shape[0] == labels.shape[0] == 64 * 20
    np.testing.assert_array_equal(np.unique(ids // 100, axis=0), [np.arange(26)])


def _array(variable: Any) -> Any:
    return np.asarray(variable.value)


def _weights_for_torch(network: keras.Model, name: str) -> dict[str, Any]:
    def norm(layer: str) -> dict[str, Any]:
        one = network.get_layer(layer)
        return {"weight": _array(one.gamma), "bias": _array(one.beta)}

    def dense(layer: Any) -> dict[str, Any]:
        return {"weight": np.ascontiguousarray(_array(layer.kernel).T), "bias": _array(layer.bias)}

    parts: dict[str, dict[str, Any]] = {
        "tokens": {"weight": _array(network.get_layer("tokens").embeddings)},
        "norm": norm("norm"),
    }
    for index in range(2):
        attention = network.get_layer(f"attention_{index}")
        parts[f"blocks.{index}.attention.inner"] = dense(attention.inner)
        parts[f"blocks.{index}.attention.outer"] = dense(attention.outer)
        for part in ("expand", "contract"):
            parts[f"blocks.{index}.{part}"] = dense(network.get_layer(f"{part}_{index}"))
        for part in ("first_norm", "second_norm"):
            parts[f"blocks.{index}.{part}"] = norm(f"{part}_{index}")
    if name == "bert":
        parts |= {part: dense(network.get_layer(part)) for part in ("pooler", "head")}
    weights = {f"{part}.{key}": value for part, two in parts.items() for key, value in two.items()}
    return weights | {"positions": _array(network.get_layer("positions").vectors)}


_PROGRAM = """
import sys
import numpy as np, torch
from benchmarks.gpu.models import model_of
from benchmarks.gpu.workers.torch_networks import build_model
given = dict(np.load(sys.argv[2]))
tokens, logits = given.pop("input tokens"), given.pop("output logits")
network = build_model(model_of(sys.argv[1], is_tiny=True)).eval()
network.load_state_dict({name: torch.from_numpy(value) for name, value in given.items()})
np.testing.assert_allclose(network(torch.from_numpy(tokens)).detach(), logits, atol=2e-5)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_torch_computes_the_same_logits_from_the_same_weights(name: str, tmp_path: Path) -> None:
    peers = Environments().peers
    if not peers.is_file():
        pytest.skip("no environment of the peers")
    network, (tokens, _) = _build(name), model_of(name, is_tiny=True).arrays()
    rng = np.random.default_rng(1)  # biases and norms that are not zeros and ones
    network.set_weights(
        [
            one + 0.1 * rng.standard_normal(one.shape, "float32")
            for one in map(_array, network.weights)
        ]
    )
    given = _weights_for_torch(network, name)
    logits = np.asarray(network(tokens[:2]))
    path = tmp_path / "given.npz"
    np.savez(path, **given, **{"input tokens": tokens[:2], "output logits": logits})
    command = [str(peers), "-c", _PROGRAM, name, str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.stdout == "equal\n", told.stderr
