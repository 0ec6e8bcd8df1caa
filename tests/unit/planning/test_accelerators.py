"""Figures of accelerators: within reason, and as the data sheets state them."""

from __future__ import annotations

import pytest

from stratagem.planning.accelerators import ACCELERATORS


@pytest.mark.parametrize("name", ACCELERATORS)
def test_figures_of_an_accelerator_fit_together(name) -> None:
    kind = ACCELERATORS[name]
    assert kind.name == name
    assert 16e9 <= kind.memory_bytes <= 200e9
    assert 0.5 * kind.memory_bytes < kind.pool_bytes < kind.memory_bytes
    # A device reads its memory faster than others', and those of its host faster than far ones.
    assert kind.memory_bytes_per_s > kind.link_bytes_per_s > kind.network_bytes_per_s
    # Products need tens to hundreds of operations for each byte that is read.
    assert 50 < kind.peak_flops_per_s("bfloat16") / kind.memory_bytes_per_s < 1000
    assert kind.peak_flops_per_s("float32") <= kind.peak_flops_per_s("bfloat16")
    assert kind.peak_flops_per_s("int4") == kind.peak_flops_per_s("float32")
    assert bool(kind.gpu_info) == (kind.platform == "gpu")


def test_stated_figures() -> None:
    """As the data sheets have them: the H100's memory and rate, and a v5e's memory."""
    assert ACCELERATORS["H100"].memory_bytes / 2**30 == pytest.approx(79.1, abs=0.1)
    assert ACCELERATORS["H100"].peak_flops_per_s("bfloat16") == 989.4e12
    assert ACCELERATORS["H200"].memory_bytes / 1e9 == pytest.approx(151.4, abs=0.1)
    assert ACCELERATORS["v5e"].memory_bytes == 16 * 2**30


def test_cards_are_known_by_the_names_that_jax_reads_off_them() -> None:
    assert ACCELERATORS["H100"].device_kind == "NVIDIA H100 80GB HBM3"
    assert ACCELERATORS["H200"].device_kind == "NVIDIA H200"
