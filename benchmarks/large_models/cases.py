"""Decoders, machines and ways to shard: which programs are compiled."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["CASES", "DECODERS", "SIDES", "Case", "Decoder", "make_case"]

SIDES = ("shard_state=all", "shard_state=optimizer", "ModelParallel", "ModelParallel 2D", "JAX")


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder like Llama.

    Args:
        width: of the residual stream.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        inner_width: of the gated layer.
        num_layers: number of blocks.
        vocabulary: number of tokens.
        wide_head_size: size of a head, if not the width divided by their number.
    """

    width: int
    num_heads: int
    num_kv_heads: int
    inner_width: int
    num_layers: int
    vocabulary: int
    wide_head_size: int = 0

    @property
    def head_size(self) -> int:
        return self.wide_head_size or self.width // self.num_heads

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one block."""
        attention = 2 * self.width * (self.num_heads + self.num_kv_heads) * self.head_size
        return attention + 3 * self.width * self.inner_width + 2 * self.width

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole, whose last layer is not the embedding's."""
        ends = 2 * self.vocabulary * self.width + self.width
        return self.num_layers * self.num_layer_parameters + ends


def _equal_layers(num_layers: int) -> Decoder:
    return Decoder(2048, 16, 4, 9216, num_layers, 8192)


DECODERS = {
    "2 layers": _equal_layers(2),
    "6 layers": _equal_layers(6),
    "12 layers": _equal_layers(12),
    "24 layers": _equal_layers(24),
    "1B": Decoder(2048, 32, 8, 8192, 16, 128_256),  # Llama 3.2 1B, whose ends share a table
    "7B": Decoder(4096, 32, 32, 11_008, 32, 32_000),  # Llama 2 7B
    "8B": Decoder(4096, 32, 8, 14_336, 32, 128_256),  # Llama 3.1 8B
    "70B": Decoder(8192, 64, 8, 28_672, 80, 128_256),  # Llama 3.1 70B
    "tiny": Decoder(64, 4, 2, 128, 2, 96),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    Args:
        decoder: name of its sizes.
        machine: a TPU slice or a number of GPUs, as `sg.plan` names it.
        side: who shards the step.
        dtype: policy of Keras.
        recomputes: blocks are computed again in the backward pass.
        length: tokens of a sequence; a device has one sequence.
        scans: blocks are computed by one loop, with `sg.scan_layers`.
    """

    decoder: str
    machine: str
    side: str
    dtype: str = "float32"
    recomputes: bool = True
    length: int = 256
    scans: bool = False

    @property
    def name(self) -> str:
        """Name of the case's files."""
        recomputes = "recomputed" if self.recomputes else "kept"
        parts = [self.decoder, self.machine, self.side, self.dtype, recomputes, str(self.length)]
        parts += ["scanned"] if self.scans else []
        return "-".join(parts).replace(" ", "_").replace(":", "_").replace("=", "_")

    def as_json(self) -> str:
        """Returns what `make_case` reads."""
        return json.dumps(dataclasses.asdict(self))


def make_case(fields: Mapping[str, Any]) -> Case:
    """Returns a case from its fields; raises ValueError for an unknown decoder or side."""
    case = Case(**fields)
    if case.decoder not in DECODERS or case.side not in SIDES:
        raise ValueError(
            f"decoder={case.decoder!r}, side={case.side!r}: there are the decoders "
            f"{', '.join(DECODERS)}, and the sides {', '.join(SIDES)}."
        )
    return case


def _of_equal_layers() -> list[Case]:
    """Returns the cases whose memory may not grow with the number of layers."""
    sides = [one for one in SIDES if one != "shard_state=optimizer"]
    forms = [("float32", True), ("mixed_bfloat16", True), ("float32", False)]
    decoders = ("6 layers", "12 layers", "24 layers")
    return [
        Case(decoder, "v5e:2x4", side, *form)
        for form, decoder, side in itertools.product(forms, decoders, sides)
    ]


def _whole() -> list[Case]:
    """Returns the cases of published sizes."""
    machines = {
        "1B": ("v5e:2x4", "v5e:8x8", "v6e:2x4", "8xH100"),
        "7B": ("v5e:8x8", "v5e:16x16"),
        "8B": ("v5e:16x16", "v6e:8x8", "8xH100", "64xH100"),
        "70B": ("v5e:16x16", "v6e:16x16", "256xH100"),
    }
    sides = [one for one in SIDES if one != "shard_state=optimizer"]
    return [
        Case(decoder, machine, side, "mixed_bfloat16", length=2048)
        for decoder, named in machines.items()
        for machine in named
        for side in sides
    ]


CASES = (*_of_equal_layers(), *_whole())
