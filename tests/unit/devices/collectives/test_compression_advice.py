"""Advice of `compression="auto"`: the decision by hand, and that nothing is compressed unasked."""

from __future__ import annotations

import math

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.mesh import Topology
from stratagem.execution import compression_advice
from stratagem.execution.compression_advice import (
    FORMS,
    MeasuredLink,
    advice_lines,
    chosen_form,
    coding_times,
    link_of,
    measured_link,
    seconds_of,
)
from stratagem.strategies.base.automatic import AutomaticOps
from tests.unit.observe.run_events.test_wait_clock import ticking

FREE = dict.fromkeys(FORMS, 0.0)
MATRIX, VECTOR = (1000, 1000), (1000,)


def link(megabytes_per_s: float, coding_s=FREE, latency_s: float = 0.0) -> MeasuredLink:
    return MeasuredLink(latency_s, megabytes_per_s * 1e6, coding_s)


def test_link_follows_from_two_sums() -> None:
    """1 ms and 4 MB/s: of n bytes, two replicas send n in a ring."""
    times_s = {size: 1e-3 + size / 4e6 for size in (4_096, 2**21)}
    found = link_of(times_s, 2, FREE)
    assert found.latency_s == pytest.approx(1e-3)
    assert found.bytes_per_s == pytest.approx(4e6)
    # Four replicas send 3/2 of the bytes in the same time.
    assert link_of(times_s, 4, FREE).bytes_per_s == pytest.approx(6e6)


def test_noise_gives_no_negative_figures() -> None:
    found = link_of({4_096: 2e-3, 2**21: 1e-3}, 2, FREE)
    assert found.latency_s >= 0
    assert found.bytes_per_s > 0


def test_seconds_are_latency_and_bytes_and_coding() -> None:
    """At 1 MB/s, with 10 ms a message and 1 us an element to code."""
    on = link(1, dict.fromkeys(FORMS, 1e-6), latency_s=0.01)
    shapes = [MATRIX, VECTOR]
    assert seconds_of("whole", shapes, on, 2) == pytest.approx(0.01 + 4.004)
    # The vector is summed by itself: 10 ms and 4,000 bytes.
    rest_s = 0.01 + 0.004
    assert seconds_of("bfloat16", shapes, on, 2) == pytest.approx(rest_s + 0.02 + 2 + 1)
    # Blocks of 256: 1,954 of them in each half, with a scale of 4 bytes.
    assert seconds_of("int8", shapes, on, 2) == pytest.approx(rest_s + 0.02 + 2 * 0.508040 + 1)
    assert seconds_of("power_sgd", shapes, on, 2) == pytest.approx(rest_s + 0.02 + 0.032 + 1)
    assert seconds_of("top_k", shapes, on, 2) == pytest.approx(rest_s + 0.01 + 0.08 + 1)
    assert seconds_of("int8", [VECTOR], on, 2) == pytest.approx(rest_s)


@pytest.mark.parametrize(
    ("times_s", "expected"),
    [
        ((9, 8, 8, 8, 8), "whole"),
        ((9, 6, 5, 5, 5), "bfloat16"),
        ((9, 6, 4, 3, 3), "int8"),
        ((9, 9, 6, 5, 4), "top_k"),
        ((9, 5, 3, 1, 1), "power_sgd"),
        ((0, 1, 1, 1, 1), "whole"),
    ],
)
def test_a_more_lossy_form_must_save_a_third(times_s, expected) -> None:
    assert chosen_form(dict(zip(FORMS, times_s, strict=True))) == expected


def test_slow_links_are_worth_it_and_fast_ones_are_not() -> None:
    coding_s = dict.fromkeys(FORMS, 5e-9)
    (*_, slow) = advice_lines([MATRIX], link(1, coding_s), 2)
    (*_, fast) = advice_lines([MATRIX], link(5_000, coding_s), 2)
    assert slow.startswith('It would choose compression="power_sgd"')
    assert fast.startswith("It would send gradients whole")
    # Nothing of a layer's bias can be compressed.
    assert "whole" in advice_lines([VECTOR], link(1, coding_s), 2)[-1]


def test_advice_without_a_link_or_gradients() -> None:
    assert advice_lines([MATRIX], None, 2)[0].endswith("Nothing is measured in one process.")
    assert advice_lines([], link(1), 2)[-1] == "No gradients are summed."


@pytest.mark.slow
def test_coding_is_measured_for_each_form(monkeypatch) -> None:
    monkeypatch.setattr(compression_advice, "time", ticking())
    times_s = coding_times()
    assert set(times_s) == set(FORMS) - {"whole"}
    assert all(time_s > 0 and math.isfinite(time_s) for time_s in times_s.values())


def test_slowest_process_counts(monkeypatch) -> None:
    class Two:
        def exchange(self, name, value):
            own, coding_s = value
            other = {size: 10.0 + int(size) * 1e-3 for size in own}
            return [[own, coding_s], [other, dict.fromkeys(coding_s, 7.0)]]

        def return_to_step(self, number) -> None:
            assert number == 0

    topology = Topology(tuple(jax.devices()[:2]))
    assert measured_link(topology, None) is None  # a process by itself
    monkeypatch.setattr(compression_advice, "current_group", Two)
    monkeypatch.setattr(Topology, "spans_processes", True)
    monkeypatch.setattr(
        compression_advice,
        "measure_times",
        lambda topology, sizes: {"ring": dict.fromkeys(sizes, 1.0)},
    )
    found = measured_link(topology, None)
    assert found is not None
    assert found.latency_s == pytest.approx(10)
    assert found.bytes_per_s == pytest.approx(1e3)
    assert set(found.coding_s.values()) == {7.0}


def _training(compression: str | None) -> tuple[sg.Strategy, keras.Model, list[np.ndarray]]:
    ops = AutomaticOps(sg.CommunicationOptions(compression=compression), link=link(1))
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(8, 32)).astype("float32")
    model.fit(x, np.ones((8, 64), "float32"), batch_size=4, verbose=0)
    return strategy, model, model.get_weights()


@pytest.mark.parametrize("name", ["auto", pytest.param("AUTO", marks=pytest.mark.slow)])
def test_auto_says_and_changes_nothing(name, capsys) -> None:
    strategy, model, weights = _training(name)
    plain, same, wanted = _training(None)
    for one, other in zip(weights, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert strategy.cross_device_ops.compression is None
    described = strategy.describe(model)
    assert described.advice[-1].startswith("It would choose compression=")
    assert described.advice[-1] in str(described)
    assert described.transfers == plain.describe(same).transfers
    assert plain.describe(same).advice == []
    sg.collectives.explain(strategy)
    assert described.advice[-1] in capsys.readouterr().out


def test_auto_is_for_the_options_only() -> None:
    with pytest.raises(ValueError, match="CompressedAllReduce received compression='auto'"):
        sg.CompressedAllReduce("auto")
    with pytest.raises(ValueError, match="compression='auto' is not a known compression"):
        sg.local_updates.LocalSGD(compression="auto")
    strategy = sg.MultiWorkerMirroredStrategy(
        communication_options=sg.CommunicationOptions(compression="auto")
    )
    assert strategy.describe().advice[0].endswith("Nothing is measured in one process.")
