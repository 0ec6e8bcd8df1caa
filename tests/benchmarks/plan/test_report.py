"""What the table of planned and measured memory says."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.plan.report import Comparison, make_table


def _comparison(planned_mib: float) -> Comparison:
    mib = 2**20
    return Comparison(
        workload="ResNet-50",
        batch_size=64,
        compiler="gpu",
        planned_state_bytes=100 * mib,
        planned_bytes=int(planned_mib * mib),
        planned_of_many_bytes=1200 * mib,
        measured_state_bytes=101 * mib,
        measured_bytes=1000 * mib,
        how="peak of the device",
    )


@pytest.mark.parametrize(
    ("planned_mib", "agrees"), [(1000, True), (1099, True), (1101, False), (899, False)]
)
def test_a_tenth_apart_is_the_bound(planned_mib, agrees) -> None:
    row = _comparison(planned_mib)
    assert row.ratio == pytest.approx(planned_mib / 1000)
    assert row.agrees is agrees


def test_table() -> None:
    text = io.StringIO()
    Console(file=text, width=160).print(make_table("8xH100", "one H200", [_comparison(1010)]))
    assert "memory of a device, beside one replica on one H200" in text.getvalue()
    assert "1.200" in text.getvalue()  # of 8xH100
    assert "ResNet-50, 64 a device" in text.getvalue()
    assert "1.010" in text.getvalue()
