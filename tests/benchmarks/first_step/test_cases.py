"""Sides of the first step, and the caches that each is given."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from benchmarks.first_step.cases import HEAVY, LIGHT, REFERENCE, first_step_sides
from benchmarks.workloads import WORKLOADS

CACHE = Path("a-cache")


@pytest.mark.parametrize("workload", [LIGHT, *HEAVY])
def test_sides_take_one_step_on_the_same_batch(workload: str) -> None:
    sides = first_step_sides(workload)
    assert len({one.name for one in sides}) == len(sides)
    for one in sides:
        options = one.side.options
        assert (options.workload, options.steps_per_epoch) == (workload, 1)
        assert (options.batch_size, options.steps_per_call) == (None, 1)
    assert [one.name for one in sides if one.wanted == 1.15] == [
        "Stratagem, 1 device",
        "Stratagem, 2 devices",
    ]
    assert [(one.name, one.wanted) for one in sides if one.is_warm] == [
        ("Stratagem, 1 device, warm", 0.5),
        ("Stratagem, 2 devices, warm", 0.5),
        ("Keras on JAX, warm", None),
    ]
    assert [one.is_warm for one in sides if one.name == REFERENCE] == [False]


def test_plain_keras_runs_in_our_environment() -> None:
    """With TensorFlow beside it, it imports TensorFlow, and would look slower than it is."""
    for one in first_step_sides("mlp"):
        is_peer = one.name in ("Keras on TensorFlow", "torch.compile")
        assert one.side.environment == ("peers" if is_peer else "ours")


def test_only_warm_sides_have_a_cache_and_ours_is_the_default_one() -> None:
    for one in first_step_sides("mlp"):
        variables = one.variables(CACHE)
        is_ours = one.name.startswith("Stratagem")
        assert (variables.get("STRATAGEM_CACHE_DIR") == "a-cache") is (one.is_warm and is_ours)
        is_of_jax = one.is_warm and not is_ours
        assert (variables.get("JAX_COMPILATION_CACHE_DIR") == "a-cache") is is_of_jax
        if one.name == "torch.compile":
            assert variables["TORCHINDUCTOR_CACHE_DIR"] == "a-cache"
        elif not one.is_warm:
            assert variables["JAX_ENABLE_COMPILATION_CACHE"] == "false"


def test_variables_are_settings_of_jax() -> None:
    """A misspelled one would leave the cache as it is by default."""
    for one in first_step_sides("mlp"):
        for name in one.variables(CACHE):
            if name.startswith("JAX_"):
                assert name.lower() in jax.config.values


def test_heavy_workloads_are_cheap_to_run() -> None:
    for name in HEAVY:
        assert WORKLOADS[name].batch_size == 8


def test_labels_of_the_decoder_are_the_next_tokens() -> None:
    tokens, labels = WORKLOADS["gpt2"].batch()
    assert tokens.shape == labels.shape == (8, 64)
    assert (labels[:, :-1] == tokens[:, 1:]).all()
    assert (labels != tokens).any()
