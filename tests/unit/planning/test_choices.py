"""Choices with the figures of a plan in place of estimates."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.planning.candidates import Estimate, Form, PlanCandidate
from stratagem.planning.choices import PlanChoice, PlanSearch
from stratagem.planning.targets import parse_target

_TARGET = parse_target("8xH100")
_LINKS = "collectives over NVLink"


def _choice() -> PlanChoice:
    candidate = PlanCandidate(
        strategy="MirroredStrategy",
        num_replicas=8,
        devices_per_replica=1,
        shard_size=8,
        shard_state="all",
        form=Form(),
    )
    seconds = {"compute": 1.0, _LINKS: 0.5, "host link": 0.0}
    return PlanChoice(candidate, Estimate(2**30, 1.0, 0.4, True, "compute", seconds), _TARGET)


def _plan(*, fits: bool = True, reduction_s: float = 0.1) -> Any:
    step = SimpleNamespace(step_s=2.0, compute_s=1.0, launch_s=0.0, reduction_s=reduction_s)
    return SimpleNamespace(memory=SimpleNamespace(total_bytes=2**31), step=step, fits=fits)


def test_figures_of_a_plan_replace_estimates() -> None:
    choice = dataclasses.replace(_choice(), plan=_plan())
    assert (choice.memory_bytes, choice.step_s, choice.limit) == (2**31, 2.0, "compute")
    assert choice.mfu == pytest.approx(0.2)
    fields = choice.to_dict()
    assert (fields["is_compiled"], fields["estimated_step_s"]) == (True, 1.0)


def test_limit_of_a_plan() -> None:
    assert dataclasses.replace(_choice(), plan=_plan(reduction_s=3.0)).limit == _LINKS
    assert dataclasses.replace(_choice(), plan=_plan(fits=False)).limit == "memory"


def test_headline_says_if_nothing_fits() -> None:
    one = dataclasses.replace(_choice(), plan=_plan(fits=False))
    found = PlanSearch("model", _TARGET, 16, (one,), 40)
    assert found.headline == (
        "model on 8xH100, global batch 16: the best 1 of 40 settings. None of them fits."
    )
