"""Tables and plots of a plan."""

from __future__ import annotations

import dataclasses
import io

import keras
import numpy as np
import pytest
from rich.console import Console

import stratagem as sg
from stratagem.logs import size_text
from stratagem.planning.report import count_text, headline, show, time_text, verdict
from stratagem.planning.result import Plan
from stratagem.planning.schedule import Reduction
from stratagem.planning.targets import parse_target
from tests.unit.test_rendering import require_plain

_GIB = 2**30


@pytest.fixture(scope="module")
def plan() -> Plan:
    def build():
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256)])
        model.compile("adam", "mse")
        return model

    return sg.plan(build, (np.ones((8, 256)), np.ones((8, 256))), "2xH100")


def _with_temporaries(plan: Plan, num_bytes: int, **fields) -> Plan:
    memory = dataclasses.replace(plan.memory, temporary_bytes=num_bytes)
    return dataclasses.replace(plan, memory=memory, **fields)


def _shown(plan: Plan) -> str:
    text = io.StringIO()
    show(plan, Console(width=160, file=text))
    return text.getvalue()


def test_tables_have_the_figures_of_the_plan(plan) -> None:
    text = _shown(plan)
    assert f"{plan.title} on 2xH100: 65.8 k parameters, global batch 8, 4 per device" in text
    assert size_text(plan.memory.total_bytes) in text
    assert "all-reduce" in text
    assert "unknown" in text
    assert "0.5 of peak FLOP/s in matrix products" in text
    assert "pip install jax-cuda12-pjrt" in text


def test_kernel_starts_are_in_the_computing_time(plan) -> None:
    assert "kernel starts" not in _shown(plan)
    (first, *_) = plan.scaling
    longer = dataclasses.replace(first, compute_s=1.5, launch_s=0.25)
    text = _shown(dataclasses.replace(plan, num_launches=1234, scaling=(longer,)))
    assert "'compute' includes 1234 kernel starts per step, 250.0 ms." in text
    (row,) = [line for line in text.splitlines() if line.startswith("│       1 │")]
    assert "1.75 s" in row


def test_messages_are_listed_by_where_they_go(plan) -> None:
    reductions = (
        Reduction("a", 4000, (), "reduce-scatter", ((0, 1, 2, 3), (4, 5, 6, 7))),
        Reduction("b", 1000, ("dot.1",), leaves_slice=True),
        Reduction("c", 8, (), groups=((0, 1, 2, 3, 4, 5, 6, 7),)),
    )
    two_slices = dataclasses.replace(
        plan, target=parse_target("2xv5e:2x2"), reductions=reductions, is_scheduled=True
    )
    lines = _shown(two_slices).splitlines()
    (within,) = [line for line in lines if "reduce-scatter, within slices" in line]
    (between,) = [line for line in lines if "all-reduce, between slices" in line]
    assert "3.9 KiB" in within
    assert "100%" in between
    assert any("all-reduce, all devices" in line for line in lines)


@pytest.mark.parametrize(
    ("temporary_bytes", "fields", "text"),
    [
        (0, {}, "Fits: "),
        (70 * _GIB, {}, "Fits only with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"),
        (90 * _GIB, {}, "Does not fit: 90.00 GiB"),
        (0, {"is_refused": True}, "Does not fit: the compiler rejects it"),
    ],
)
def test_verdict(plan, temporary_bytes, fields, text) -> None:
    changed = _with_temporaries(plan, temporary_bytes, **fields)
    assert verdict(changed).startswith(text)
    assert changed.fits == text.startswith("Fits: ")


def test_plan_that_does_not_fit_shows_sharded_sizes(plan) -> None:
    """Adam's moments and the weights of 256 x 256 in halves; 4 * 256 + 16 bytes in copies."""
    assert "Sharded over" not in _shown(plan)
    text = _shown(_with_temporaries(plan, 90 * _GIB))
    weights = 4 * 256 * 256
    copied = size_text(plan.memory.state_bytes)
    assert f"Variables take {copied} per device" in text
    halves = [plan.memory.state_bytes - weights, plan.memory.state_bytes - 3 * weights // 2]
    assert list(plan.shared_state_bytes.values()) == halves
    told = " or ".join(
        f"{size_text(size)} (shard_state={name})"
        for name, size in zip(("optimizer", "all"), halves, strict=True)
    )
    assert told in text.replace("\n", " ")


def test_headline_says_how_replicas_are_placed(plan) -> None:
    assert headline(dataclasses.replace(plan, shard_state="all")).startswith(
        f"{plan.title} on 2xH100, shard_state=all: 65.8 k parameters"
    )
    one = headline(dataclasses.replace(plan, num_replicas=1))
    assert "1 replica of 2 devices: " in one
    assert one.endswith("8 per replica")


def test_sizes_times_and_counts() -> None:
    assert [size_text(size) for size in (5, 2000, 2**20, _GIB)] == [
        "5 B",
        "2.0 KiB",
        "1.0 MiB",
        "1.00 GiB",
    ]
    assert [time_text(seconds) for seconds in (0, 2e-6, 0.01, 2)] == [
        "0 us",
        "2 us",
        "10.0 ms",
        "2.00 s",
    ]
    assert [count_text(number) for number in (7, 1200, 2.5e15)] == ["7", "1.2 k", "2.5 P"]


def test_plan_prints_its_tables(plan) -> None:
    text = str(plan)
    for line in (headline(plan), verdict(plan), "Communication per step", "all-reduce"):
        assert line in text
    assert max(map(len, text.splitlines())) <= 120
    assert repr(plan) == f"<Plan: {headline(plan)}. {verdict(plan)}>"
    texts = require_plain(plan._repr_html_()).texts
    assert texts[:2] == [headline(plan), verdict(plan)]
    assert size_text(plan.memory.total_bytes) in texts
