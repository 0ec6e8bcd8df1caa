"""The sides of the GPU benchmarks, and the goals that name them."""

from __future__ import annotations

import pytest

from benchmarks.gpu.models import MODELS
from benchmarks.gpu.sides import SIDES, WORKLOAD_NAMES, cold_sides, select
from benchmarks.gpu.wanted import WANTED

_KEYS = {side.key for side in SIDES}


def test_keys_are_unique_and_every_workload_has_ours_and_a_peer() -> None:
    assert len(_KEYS) == len(SIDES)
    for workload in WORKLOAD_NAMES:
        assert {side.is_ours for side in SIDES if side.workload == workload} == {True, False}


def test_goals_name_sides() -> None:
    for goal in WANTED:
        assert goal.ours in _KEYS
        assert not goal.reference or goal.reference in _KEYS


def test_calls_and_updates_of_a_side_have_whole_epochs() -> None:
    for side in SIDES:
        if side.workload in MODELS:
            steps = side.options.get("steps_per_call", 1)
            assert MODELS[side.workload].steps_per_epoch % steps == 0
            accumulation = side.options.get("accumulation", 1)
            assert MODELS[side.workload].steps_per_epoch % accumulation == 0
            if side.program == "jax_llama":
                assert steps % accumulation == 0


def test_names_select_workloads_and_beginnings_of_keys_by_priority() -> None:
    chosen = select(["gpt", "mlp-fit-100"])
    assert {side.workload for side in chosen} == {"gpt", "mlp"}
    assert [side.key for side in chosen if side.workload == "mlp"] == ["mlp-fit-100-a-call"]
    assert [side.priority for side in chosen] == sorted(side.priority for side in chosen)
    assert len(select([])) == len(SIDES)
    assert select(["cold"]) == cold_sides()


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="No side is called 'vgg'"):
        select(["vgg"])
