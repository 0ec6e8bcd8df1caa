"""Settings of compression: what is compressed, how many bytes are sent, and bad input."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem.devices.compression import Compression

ALL = ["bfloat16", "float16", "int8", "float8", "power_sgd"]


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
    assert not sg.compression.PowerSGD(rank=4).compresses((10_000, 4))  # thin already
    assert not sg.compression.PowerSGD(rank=64).compresses((100, 100))
    assert sg.compression.PowerSGD(rank=4).compresses((10_000, 10))


# Methods of training with local steps: defaults, and bad numbers of these and of compression.

LOCAL_SGD, DILOCO = sg.local_updates.LocalSGD, sg.local_updates.DiLoCo
STREAMING, QUADRATIC = sg.local_updates.StreamingDiLoCo, sg.local_updates.QuadraticPeriod
INT8, POWER_SGD = sg.compression.Int8, sg.compression.PowerSGD


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
        (LOCAL_SGD, "period", 0, ValueError),
        (LOCAL_SGD, "period", 2.0, TypeError),
        (LOCAL_SGD, "period", True, TypeError),
        (LOCAL_SGD, "warmup_steps", -1, ValueError),
        (DILOCO, "outer_momentum", 1.5, ValueError),
        (DILOCO, "outer_learning_rate", "0.7", TypeError),
        (STREAMING, "fragments", 0, ValueError),
        (STREAMING, "overlap", 100, ValueError),
        (STREAMING, "own_share", 2, ValueError),
        (QUADRATIC, "base", 0, ValueError),
        (QUADRATIC, "base", 2.5, TypeError),
        (QUADRATIC, "growth", 0, ValueError),
        (QUADRATIC, "growth", "0.1", TypeError),
        (QUADRATIC, "total_steps", 0, ValueError),
        (QUADRATIC, "total_steps", 1e3, TypeError),
    ],
)
def test_invalid_number_is_refused(kind, name, value, error) -> None:
    needed = {"base": 4, "growth": 0.1} if kind is QUADRATIC else {}
    with pytest.raises(error, match=f"{kind.__name__} received {name}={value!r}"):
        kind(**{**needed, name: value})


def test_period_may_be_a_rule_but_for_fragments() -> None:
    rule = QUADRATIC(base=4, growth=0.1)
    assert LOCAL_SGD(period=rule).period is rule
    assert DILOCO(period=rule).period is rule
    with pytest.raises(TypeError, match="fragments are sent at fixed steps"):
        STREAMING(period=rule)


# CommunicationOptions: valid and invalid values.


@pytest.mark.parametrize("name", ["NCCL", "nccl", sg.CommunicationImplementation.NCCL])
def test_implementation_may_be_named(name) -> None:
    options = sg.CommunicationOptions(implementation=name)
    assert options.implementation is sg.CommunicationImplementation.NCCL


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        *(
            (
                {"bytes_per_pack": n},
                ValueError if n == -1 else TypeError,
                f"received bytes_per_pack={n!r}",
            )
            for n in (-1, 1.5, True, "4")
        ),
        *(
            (
                {"timeout_seconds": n},
                ValueError if n == -1 else TypeError,
                f"received timeout_seconds={n!r}",
            )
            for n in (-1, True, "4")
        ),
        *(
            ({"implementation": n}, ValueError, f"={n!r} is not a known algorithm(?s:.)*AUTO, RING")
            for n in ("STAR", 3, None)
        ),
        ({"reduction_dtype": "int8"}, ValueError, "received reduction_dtype='int8'"),
        ({"compression": "int4"}, ValueError, r'not a known compression(?s:.)*"power_sgd"'),
        ({"compression": 8}, TypeError, r'not a known compression(?s:.)*"power_sgd"'),
        (
            {"reduction_dtype": "bfloat16", "compression": "int8"},
            ValueError,
            "reduction_dtype='bfloat16' and compression=Int8",
        ),
    ],
)
def test_other_options_are_refused(options, error, words) -> None:
    with pytest.raises(error, match=words):
        sg.CommunicationOptions(**options)


def test_defaults_are_tensorflows_and_those_of_the_papers() -> None:
    options = sg.CommunicationOptions()
    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert options.implementation is sg.CommunicationImplementation.AUTO
    assert options.reduction_dtype is None
    half = sg.CommunicationOptions(reduction_dtype="bfloat16")
    assert (half.reduction_dtype, half.compression) == ("bfloat16", None)
    diloco, local = DILOCO(), LOCAL_SGD()
    found = diloco.period, diloco.outer_learning_rate, diloco.outer_momentum
    assert found == (500, 0.7, 0.9)
    assert (local.period, local.warmup_steps, local.compression) == (8, 0, None)
    assert LOCAL_SGD(compression="int8").compression == sg.compression.Int8()


def test_hints_are_options_that_leave_the_algorithm_open() -> None:
    hints = sg.CollectiveHints(bytes_per_pack=8, timeout_seconds=3.0)
    assert isinstance(hints, sg.CommunicationOptions)
    assert (hints.bytes_per_pack, hints.timeout_seconds) == (8, 3.0)
    assert hints.implementation is sg.CollectiveCommunication.AUTO
    with pytest.raises(TypeError, match="implementation"):
        sg.CollectiveHints(implementation="RING")
    with pytest.raises(ValueError, match="received bytes_per_pack=-1"):
        sg.CollectiveHints(-1)
