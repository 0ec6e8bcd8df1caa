"""Settings of compression: what is compressed, how many bytes are sent, and bad input."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem.devices.compression import Compression

ALL = ["bfloat16", "float16", "int8", "float8", "power_sgd", "top_k"]
INT8, POWER_SGD, TOP_K = sg.compression.Int8, sg.compression.PowerSGD, sg.compression.TopK


@pytest.mark.parametrize("name", ALL)
def test_name_stands_for_the_defaults(name) -> None:
    compression = sg.CommunicationOptions(compression=name).compression
    assert isinstance(compression, sg.compression.Compression)
    assert compression == type(compression)()
    assert compression.error_feedback


@pytest.mark.parametrize(
    ("compression", "expected"),
    [
        (sg.compression.BFloat16(), 3 * 2 * 2_500 * 2),
        (sg.compression.Float16(), 3 * 2 * 2_500 * 2),
        (sg.compression.Int8(block_elements=100), 3 * 2 * (2_500 + 25 * 4)),
        (sg.compression.Float8(block_elements=1000), 3 * 2 * (3_000 + 3 * 4)),
        (sg.compression.PowerSGD(rank=2), 2 * 3 / 4 * 2 * (100 + 100) * 4),
        (sg.compression.TopK(fraction=0.01), 3 * 100 * 8),
    ],
)
def test_bytes_that_one_of_four_replicas_sends(compression, expected) -> None:
    assert compression.sent_bytes((100, 100), num_replicas=4) == expected


@pytest.mark.parametrize(
    ("compression", "expected"),
    [
        # Parts of 3 and 25 elements: blocks of 10 numbers and a scale.
        (sg.compression.Int8(block_elements=10), 3 * 2 * 3 * 14),
        (sg.compression.BFloat16(), 3 * 2 * 28 * 2),
        (sg.compression.PowerSGD(rank=2), 2 * 3 / 4 * 2 * (5 + 2 + 20 + 5) * 4),
        (sg.compression.TopK(fraction=0.01), 3 * (1 + 1) * 8),
    ],
)
def test_gradients_that_travel_together_share_blocks(compression, expected) -> None:
    assert compression.sent_bytes((5, 2), (20, 5), num_replicas=4) == expected


@pytest.mark.parametrize("name", ALL)
def test_vectors_and_small_matrices_are_sent_whole(name) -> None:
    compression = Compression.parse(name)
    assert compression is not None
    shapes = [(), (10_000,), (8, 8), (64, 64), (3, 3, 16, 32)]
    assert [compression.compresses(shape) for shape in shapes] == [False] * 3 + [True] * 2


def test_matrices_that_are_thin_already_have_no_factors() -> None:
    assert not sg.compression.PowerSGD(rank=4).compresses((10_000, 4))
    assert not sg.compression.PowerSGD(rank=64).compresses((100, 100))
    assert sg.compression.PowerSGD(rank=4).compresses((10_000, 10))


@pytest.mark.parametrize(
    ("kind", "name", "value", "error"),
    [
        (INT8, "block_elements", 0, ValueError),
        (INT8, "block_elements", 2.0, TypeError),
        (INT8, "stochastic", 1, TypeError),
        (INT8, "error_feedback", None, TypeError),
        (INT8, "min_elements", 0, ValueError),
        (POWER_SGD, "rank", 0, ValueError),
        (POWER_SGD, "rank", True, TypeError),
        (TOP_K, "fraction", 0.0, ValueError),
        (TOP_K, "fraction", 1.5, ValueError),
        (TOP_K, "fraction", "1%", TypeError),
    ],
)
def test_invalid_number_is_refused(kind, name, value, error) -> None:
    with pytest.raises(error, match=f"{kind.__name__} received {name}={value!r}"):
        kind(**{name: value})


@pytest.mark.parametrize(("value", "error"), [("int4", ValueError), (8, TypeError)])
def test_unknown_compression_is_refused(value, error) -> None:
    with pytest.raises(error, match=r'is not a known compression(?s:.)*"power_sgd"'):
        sg.CommunicationOptions(compression=value)


def test_two_ways_to_send_are_refused() -> None:
    with pytest.raises(ValueError, match="reduction_dtype='bfloat16' and compression=Int8"):
        sg.CommunicationOptions(reduction_dtype="bfloat16", compression="int8")
