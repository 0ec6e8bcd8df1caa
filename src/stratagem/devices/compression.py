"""Lossy forms in which gradients are sent between replicas: their settings.

The error of a gradient is added to the next one, so that it is late and not lost.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.errors import explain

__all__ = [
    "BFloat16",
    "Float16",
    "Float8",
    "Int8",
    "PowerSGD",
]

_WHOLE_BYTES = 4
_SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression(abc.ABC):
    """A lossy form of float32 gradients; base class of all of them.

    Gradients of matrices and convolution kernels are compressed. Those of vectors and scalars, such
    as biases and the parameters of normalization, of tables with row lookups, of variables that
    are not mirrored, and of fewer than `min_elements` elements are sent whole.

    Args:
        error_feedback: True to add each replica's error to its next gradient. It takes as much
            memory as the gradients.
        min_elements: number of elements from which on a gradient is compressed.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of range.

    Example:
        >>> isinstance(sg.compression.Int8(), sg.compression.Compression)
        True

    Source: Seide et al., 1-bit stochastic gradient descent, 2014; Karimireddy et al., Error
    feedback fixes SignSGD, 2019.
    """

    error_feedback: bool = True
    min_elements: int = 1024

    @staticmethod
    def parse(value: object) -> Compression | None:
        """Returns a compression from an instance, its name, or None.

        Args:
            value: what a user passed.

        Raises:
            ValueError: an unknown name.
            TypeError: another type.

        Example:
            >>> sg.compression.Compression.parse("power_sgd").rank
            4
        """
        if value is None or isinstance(value, Compression):
            return value
        names = ", ".join(f'"{name}"' for name in _NAMED)
        message = explain(
            f"compression={value!r} is not a known compression.",
            expected=f"one of {names}, an object such as sg.compression.Int8(), or None.",
            fix='pass compression="int8", for example, or omit it.',
        )
        if not isinstance(value, str):
            raise TypeError(message)
        if value not in _NAMED:
            raise ValueError(message)
        return _NAMED[value]()

    def __post_init__(self) -> None:
        check_field(self, "error_feedback", bool)
        check_field(self, "min_elements", int, least=1)

    @abc.abstractmethod
    def sent_bytes(self, *shapes: Sequence[int], num_replicas: int) -> int:
        """Returns the number of bytes that a replica sends for gradients that travel together.

        Args:
            *shapes: shape of each gradient, at least one.
            num_replicas: number of replicas.
        """

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of what a replica keeps between steps for one gradient, by name.

        Args:
            shape: shape of the gradient.
        """
        return {"error": tuple(shape)} if self.error_feedback else {}

    def compresses(self, shape: Sequence[int]) -> bool:
        """Returns True for gradients that are compressed, as far as their shape decides.

        Args:
            shape: shape of the gradient.

        Example:
            >>> [sg.compression.Int8().compresses(shape) for shape in [(64, 64), (4096,)]]
            [True, False]
        """
        return len(shape) > 1 and math.prod(shape) >= self.min_elements


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Numbers(Compression):
    """Each element is sent as a shorter number; replicas add parts of the sum and pass them on."""

    def number_bytes(self, num_elements: int) -> int:
        """Returns the bytes of so many elements, as floats of 16 bits."""
        return 2 * num_elements

    def sent_bytes(self, *shapes: Sequence[int], num_replicas: int) -> int:
        """Returns the bytes of the parts for the other replicas, before and after the sum."""
        part = sum(-(-math.prod(shape) // num_replicas) for shape in shapes)
        return 2 * (num_replicas - 1) * self.number_bytes(part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BFloat16(_Numbers):
    """Gradients as bfloat16: half the bytes, with the range of float32 and 8 significant bits.

    Args:
        error_feedback: as for `Compression`.
        min_elements: as for `Compression`.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of range.

    Example:
        >>> sg.compression.BFloat16().sent_bytes((1000, 1000), num_replicas=2)
        2000000

    Source: Kalamkar et al., A study of bfloat16 for deep learning training, 2019.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float16(_Numbers):
    """Gradients as float16: half the bytes, a smaller range than float32, and 11 significant bits.

    Larger elements than 65504 are cut; the rest is an error like any other.

    Args:
        error_feedback: as for `Compression`.
        min_elements: as for `Compression`.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of range.

    Example:
        >>> sg.CommunicationOptions(compression="float16").compression
        Float16(error_feedback=True, min_elements=1024)

    Source: PyTorch, torch.distributed.algorithms.ddp_comm_hooks, fp16_compress_hook.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Blocks(_Numbers):
    """Numbers of a byte, with a scale for each block of elements."""

    block_elements: int = 256
    stochastic: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "block_elements", int, least=1)
        check_field(self, "stochastic", bool)

    def number_bytes(self, num_elements: int) -> int:
        """Returns a byte for each element, and a float32 for each block."""
        width = min(self.block_elements, num_elements)
        num_blocks = -(-num_elements // width)
        return num_blocks * (width + _SCALE_BYTES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(_Blocks):
    """Gradients as 8-bit integers with a scale for each block: about a quarter of the bytes.

    Args:
        error_feedback: as for `Compression`.
        min_elements: as for `Compression`.
        block_elements: number of neighboring elements that share a scale.
        stochastic: True to round up or down by chance, so that the expected value is exact; False
            to round to the nearest.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of range.

    Example:
        >>> sg.compression.Int8().sent_bytes((1024, 1024), num_replicas=2)
        1064960

    Source: Dettmers, 8-bit approximations for parallelism in deep learning, 2015; Alistarh et al.,
    QSGD, 2017, for the rounding.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8(_Blocks):
    """Gradients as 8-bit floats (e4m3) with a scale for each block.

    As many bytes as `Int8`; small elements of a block keep more of their precision, and large ones
    less.

    Args:
        error_feedback: as for `Compression`.
        min_elements: as for `Compression`.
        block_elements: as for `Int8`.
        stochastic: as for `Int8`.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of range.

    Example:
        >>> sg.compression.Float8(block_elements=128).stochastic
        True

    Source: Micikevicius et al., FP8 formats for deep learning, 2022.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(Compression):
    """Gradients as products of two thin matrices, which are found by a step of power iteration.

    A gradient of shape (..., m) is a matrix of m columns. Both factors are summed over replicas.
    The second one starts from that of the step before.

    Args:
        error_feedback: as for `Compression`.
        min_elements: as for `Compression`.
        rank: number of columns of the factors.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of range.

    Example:
        >>> sg.compression.PowerSGD(rank=2).sent_bytes((1000, 1000), num_replicas=2)
        16000

    Source: Vogels, Karimireddy and Jaggi, PowerSGD, 2019.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "rank", int, least=1)

    def sent_bytes(self, *shapes: Sequence[int], num_replicas: int) -> int:
        """Returns the bytes of both factors, in a ring."""
        size = self.rank * sum(sum(matrix_shape(shape)) for shape in shapes) * _WHOLE_BYTES
        return 2 * size * (num_replicas - 1) // num_replicas

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of the error, and of the second factor."""
        return {**super().state_shapes(shape), "factor": (matrix_shape(shape)[1], self.rank)}

    def compresses(self, shape: Sequence[int]) -> bool:
        """Returns True if both factors have fewer elements than the gradient."""
        if not super().compresses(shape):
            return False
        rows, columns = matrix_shape(shape)
        return self.rank * (rows + columns) < rows * columns and self.rank <= min(rows, columns)


_NAMED: Mapping[str, type[Compression]] = {
    "bfloat16": BFloat16,
    "float16": Float16,
    "int8": Int8,
    "float8": Float8,
    "power_sgd": PowerSGD,
}


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and columns of an array as a matrix: its last axis has the columns."""
    return math.prod(shape[:-1]), shape[-1]


def unexpected(setting: object, name: str, expected: str) -> str:
    """Returns the message for a wrong field of a setting."""
    return explain(
        f"{type(setting).__name__} received {name}={getattr(setting, name)!r}.",
        expected=f"{expected}.",
        fix=f"pass another {name}, or omit it.",
    )


def check_field(
    setting: object, name: str, kind: Any, least: float = 0, most: float = math.inf
) -> None:
    """Raises TypeError unless a field of a setting is of a kind, ValueError if out of range."""
    value = getattr(setting, name)
    noun = {bool: "True or False", int: "an integer"}.get(kind, "a number")
    bounds = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
    expected = noun if kind is bool else f"{noun} {bounds}"
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise TypeError(unexpected(setting, name, expected))
    if not least <= value <= most:
        raise ValueError(unexpected(setting, name, expected))
