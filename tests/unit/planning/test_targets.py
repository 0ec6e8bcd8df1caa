"""Names of targets, and the table of accelerators."""

from __future__ import annotations

import pytest

from stratagem.planning.targets import parse_target


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


@pytest.mark.parametrize(
    ("text", "num_devices", "larger"),
    [
        ("2xH100", 8, "8xH100"),
        ("2xH100", 4096, "4096xH100"),
        ("64xH100", 128, "128xH100"),
        ("v5e:4x4", 64, "4xv5e:4x4"),
    ],
)
def test_larger_machines_have_full_hosts(text, num_devices, larger) -> None:
    assert parse_target(text).of_size(num_devices) == parse_target(larger)


def test_topology_has_hosts_and_slices() -> None:
    devices = parse_target("2xv5e:4x4").topology.devices
    assert [device.slice_index for device in devices] == [0] * 16 + [1] * 16
    assert devices[31].process_index == 3
    assert (str(devices[31]), devices[0].device_kind) == ("tpu:31", "TPU v5 lite")
