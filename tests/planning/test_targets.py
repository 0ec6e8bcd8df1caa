"""Names of targets, and the table of accelerators."""

from __future__ import annotations

import pytest

from stratagem.planning import ACCELERATORS, parse_target


@pytest.mark.parametrize(
    ("text", "name", "num_devices", "num_groups"),
    [
        ("8xH100", "8xH100", 8, 1),
        ("h100", "1xH100", 1, 1),
        ("64xH100", "64xH100", 64, 8),
        ("4xl4", "4xL4", 4, 1),
        ("v5e:4x4", "v5e:4x4", 16, 1),
        (" v5p:2x2x1 ", "v5p:2x2x1", 4, 1),
        ("2xv6e:16x16", "2xv6e:16x16", 512, 2),
        ("1xV4:2x2x2", "v4:2x2x2", 8, 1),
    ],
)
def test_machine_of_a_name(text, name, num_devices, num_groups) -> None:
    target = parse_target(text)
    assert (target.name, target.num_devices, target.num_groups) == (name, num_devices, num_groups)
    assert parse_target(target.name) == target


@pytest.mark.parametrize(
    "text", ["8xH101", "v5e", "8", "x", "", "8xH100:2x2", "v7:2x2", "8 x H100"]
)
def test_unknown_machine_lists_known_ones(text) -> None:
    with pytest.raises(
        ValueError, match=r"is not a known machine|names a TPU without the shape"
    ) as raised:
        parse_target(text)
    assert "v5e:4x4" in str(raised.value)


@pytest.mark.parametrize("text", ["0xH100", "v5e:0x4", "0xv5e:2x2"])
def test_machine_without_devices(text) -> None:
    with pytest.raises(ValueError, match="has no devices"):
        parse_target(text)


def test_gpus_that_fill_no_hosts() -> None:
    with pytest.raises(ValueError, match=r"12 GPUs do not fill hosts of 8") as raised:
        parse_target("12xH100")
    assert "use 8 or 16" in str(raised.value)


def test_target_that_is_not_a_string() -> None:
    with pytest.raises(TypeError, match="is of type int"):
        parse_target(8)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8xH100", [1, 2, 4, 8]),
        ("6xH100", [1, 2, 4, 6]),
        ("64xH100", [1, 2, 4, 8, 16, 32, 64]),
        ("24xH100", [1, 2, 4, 8, 16, 24]),
        ("2xv5e:4x4", [1, 2, 4, 8, 16, 32]),
        ("1xL4", [1]),
    ],
)
def test_sizes_to_scale_over(text, sizes) -> None:
    target = parse_target(text)
    assert target.sizes() == sizes
    assert [target.of_size(size).num_devices for size in sizes] == sizes
    assert target.of_size(sizes[-1]) == target


def test_topology_has_hosts_and_slices() -> None:
    devices = parse_target("2xv5e:4x4").topology.devices
    assert [device.slice_index for device in devices] == [0] * 16 + [1] * 16
    assert devices[31].process_index == 3
    assert (str(devices[31]), devices[0].device_kind) == ("tpu:31", "TPU v5 lite")


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
