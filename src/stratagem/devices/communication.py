"""`CommunicationOptions`: user options for collectives."""

from __future__ import annotations

import dataclasses
import enum

from stratagem.devices.compression import Compression
from stratagem.errors import check_choice, check_number, invalid

__all__ = [
    "CommunicationImplementation",
    "CommunicationOptions",
]


class CommunicationImplementation(enum.Enum):
    """Algorithm that combines values across processes.

    AUTO chooses by the size of an array, by rules that follow from measurements. RING, HIERARCHICAL
    and TWO_STAGE are written out in the program; TWO_STAGE is for links of a high latency. NCCL
    leaves it to the compiler, which uses NCCL on GPUs, and Gloo between processes on CPU.

    Example:
        >>> ring = sg.CommunicationImplementation.RING
        >>> sg.CommunicationOptions(implementation="ring").implementation is ring
        True

    Source: TF 2.21 collective_util.py, CommunicationImplementation.
    """

    AUTO = "AUTO"
    RING = "RING"
    HIERARCHICAL = "HIERARCHICAL"
    TWO_STAGE = "TWO_STAGE"
    NCCL = "NCCL"


CollectiveCommunication = CommunicationImplementation


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options for collectives.

    Args:
        bytes_per_pack: approximate size of the buffers that gradients are packed into between
            processes on CPU, where messages are expensive; elsewhere the compiler combines them. 0
            is 256 KiB; over links of a high latency, choose 16 MiB.
        timeout_seconds: maximum seconds that a collective waits for a live process without
            progress; None for `STRATAGEM_STUCK_TIMEOUT_S`, 0 for no limit.
        implementation: the algorithm; a member or its name.
        reduction_dtype: "bfloat16" sends float32 gradients in half as many bytes. Each is rounded
            before it is added, and the sum once more, so the error of a sum of gradients g is at
            most 2**-8 (sum |g| + |sum g|), less than one percent of sum |g|. None rounds nothing.
        compression: a lossy form of gradients in which errors are made up for in later steps; an
            object such as `sg.compression.Int8()` or its name, "bfloat16", "float16", "int8",
            "float8" or "power_sgd". None sends them whole.

    Raises:
        ValueError: a negative number, an unknown name or dtype, or both `reduction_dtype` and
            `compression`.
        TypeError: a number or a compression of another type.

    Example:
        >>> sg.CommunicationOptions(bytes_per_pack=50 * 1024 * 1024).timeout_seconds is None
        True

    Source: TF 2.21 collective_util.py, CommunicationOptions.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    reduction_dtype: str | None = None
    compression: Compression | str | None = None

    def __post_init__(self) -> None:
        check_number(type(self).__name__, 0, bytes_per_pack=self.bytes_per_pack)
        limit = self.timeout_seconds
        check_number(type(self).__name__, 0.0, or_none=True, timeout_seconds=limit)
        object.__setattr__(self, "implementation", _parse_implementation(self.implementation))
        wanted = (None, "bfloat16")
        check_choice(type(self).__name__, wanted, reduction_dtype=self.reduction_dtype)
        object.__setattr__(self, "compression", Compression.parse(self.compression))
        if self.compression is not None and self.reduction_dtype is not None:
            raise invalid(
                f"reduction_dtype={self.reduction_dtype!r} and "
                f"compression={self.compression!r} were given.",
                expected="at most one of them: each says how gradients are sent.",
                fix='leave reduction_dtype out. compression="bfloat16" keeps errors.',
            )


@dataclasses.dataclass(frozen=True)
class CollectiveHints(CommunicationOptions):
    """The older name of `CommunicationOptions`, without a choice of algorithm.

    Args:
        bytes_per_pack: as for `CommunicationOptions`.
        timeout_seconds: as for `CommunicationOptions`.

    Raises:
        TypeError: a number of another type.
        ValueError: a negative number.

    Example:
        >>> sg.CollectiveHints(timeout_seconds=120.0).timeout_seconds
        120.0

    Source: TF 2.21 collective_util.py, Hints.
    """

    implementation: CommunicationImplementation | str = dataclasses.field(
        default=CommunicationImplementation.AUTO, init=False
    )
    reduction_dtype: str | None = dataclasses.field(default=None, init=False)
    compression: Compression | str | None = dataclasses.field(default=None, init=False)


def _parse_implementation(value: object) -> CommunicationImplementation:
    if isinstance(value, CommunicationImplementation):
        return value
    names = list(CommunicationImplementation.__members__)
    if isinstance(value, str) and value.upper() in names:
        return CommunicationImplementation[value.upper()]
    raise invalid(
        f"implementation={value!r} is not a known algorithm.",
        expected=f"a CommunicationImplementation, or one of {', '.join(names)}.",
        fix="omit it, or pass AUTO to choose automatically.",
    )
