"""What devices exchange in a compiled program, read from its optimised HLO."""

from __future__ import annotations

import dataclasses
import math
import re

__all__ = ["Array", "Collective", "collectives_in"]

# The type stands between "=" and the operation: one array, or a tuple of those of one message.
_COLLECTIVE = re.compile(
    r"%?(?P<name>[\w.-]+) = (?P<type>\([^()]*(?:\([^()]*\)[^()]*)*\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    r"|collective-broadcast)(?P<start>-start)?\("
)
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_ARRAY = re.compile(r"\b(?P<dtype>pred|bf16|[a-z]\d+)\[(?P<sizes>[\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array that an operation results in."""

    num_bytes: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """An operation that devices do together.

    Args:
        name: of the operation in its program, as profiles call it.
        kind: such as "all-reduce", or "all-gather-start", whose results are its operands, too.
        arrays: that it results in on each device.
        line: of the program.
    """

    name: str
    kind: str
    arrays: tuple[Array, ...]
    line: str

    @property
    def num_bytes(self) -> int:
        """Bytes of its results on a device."""
        return sum(array.num_bytes for array in self.arrays)

    def moved_bytes(self, num_devices: int) -> int:
        """Returns how many bytes have to reach devices that do not have them, all devices together.

        That is what the best algorithms move, such as a ring: of an all-reduce each device sends
        what it adds to, and gets what has been added.

        Args:
            num_devices: that do it together.

        Raises:
            ValueError: a kind whose bytes are not known from its results.
        """
        others = num_devices - 1
        # Of an all-gather the result is the whole, of a reduce-scatter a part of it.
        factors = {
            "all-reduce": 2 * others,
            "all-gather": others,
            "reduce-scatter": others * num_devices,
            "all-to-all": others,
            # Each pair is a device that sends all of its array, and one that gets it.
            "collective-permute": sum(one != other for one, other in _PAIR.findall(self.line)),
        }
        if self.kind not in factors:
            raise ValueError(
                f"The program has a {self.kind}: {self.line}. Expected: one of "
                f"{', '.join(factors)}. Teach `Collective` what it moves."
            )
        return factors[self.kind] * self.num_bytes


def collectives_in(program: str) -> list[Collective]:
    """Returns the collectives of a program.

    Args:
        program: optimised HLO, as `compiled.as_text()` gives it.

    Returns:
        In the program's order; of one that is started and awaited, the start.
    """
    found: list[Collective] = []
    for line in program.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        arrays = tuple(
            Array(_num_bytes(array["dtype"], array["sizes"]), array["dtype"])
            for array in _ARRAY.finditer(match["type"])
        )
        # The results of an all-reduce that is started are those that will be there in the end.
        kind = match["kind"]
        if match["start"] and kind != "all-reduce":
            kind += match["start"]
        found.append(Collective(match["name"], kind, arrays, line.strip()[:200]))
    return found


def _num_bytes(dtype: str, sizes: str) -> int:
    bits = {"pred": 8, "bf16": 16}.get(dtype) or int(dtype[1:])
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8
