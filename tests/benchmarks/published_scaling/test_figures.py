"""The file of published figures: complete fields, with a source each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.published_scaling.figures import Group, read_groups
from stratagem.planning.accelerators import ACCELERATORS

GROUPS = read_groups()
# Peak rates in FLOP/s, and FLOPs of training per unit: 6 per parameter and token, 3 x 2 x 4.1 G per
# image. BERT-large has 0.30 G parameters in its blocks. MLPerf packs and unpads its sequences.
_FLOPS_PER_UNIT = {"images/s": 24.6e9, "tokens/s": 6 * 6.65e9}
_LEAST_TOKENS = 64


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group.model}, {group.title}")
def test_fields_of_a_group(group: Group) -> None:
    assert group.accelerator in ACCELERATORS
    assert 2017 <= group.year <= 2026
    assert group.overlap in ("backward", "none")
    assert group.state in ("mirrored", "sharded", "sharded in hosts")
    assert group.precision in ("float16", "bfloat16")
    assert re.match(r"github\.com/[\w-]+/[\w.-]+ at [0-9a-f]{7}: \S", group.source)
    assert all(group.missing)
    devices = [row.devices for row in group.rows]
    assert devices == sorted(set(devices))
    assert len(devices) >= 2
    assert all(one <= group.devices_per_host or not one % group.devices_per_host for one in devices)
    # On several hosts, there is a network.
    assert (devices[-1] <= group.devices_per_host) == (group.network_gbit_per_s == 0)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group.model}, {group.title}")
def test_throughputs_are_possible(group: Group) -> None:
    """No device computes faster than its peak, and none a hundredth of it."""
    flops = _FLOPS_PER_UNIT.get(group.unit, 6 * 0.30e9 * _LEAST_TOKENS)
    peak = ACCELERATORS[group.accelerator].peak_flops_per_s("bfloat16")
    for row in group.rows:
        assert row.batch > 0
        assert row.passes > 0
        assert 0.01 < row.throughput / row.devices * flops / peak < 1


def test_models_and_sizes_that_were_asked_for() -> None:
    assert {group.model for group in GROUPS} == {"ResNet-50", "BERT-large", "7B"}
    assert max(row.devices for group in GROUPS for row in group.rows) >= 4096
    assert any(group.is_complete for group in GROUPS)
    assert not all(group.is_complete for group in GROUPS)


def test_unknown_fields_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "figures.toml"
    path.write_text('[[group]]\ntitle = "one"\nthroughputs = 3\nrows = []\n')
    with pytest.raises(TypeError, match="throughputs"):
        read_groups(path)
