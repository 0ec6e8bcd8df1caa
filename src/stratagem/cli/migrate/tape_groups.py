"""Several losses of one block, as in adversarial training: statements of each loss function."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence

import libcst as cst

from stratagem.cli.migrate import name_uses
from stratagem.cli.migrate.arguments import code_of
from stratagem.cli.migrate.tape_calls import GradientCall, UnusualTapeError


@dataclasses.dataclass(frozen=True)
class LossPart:
    """The statements that one loss needs; `repeated` are names that an earlier part has too."""

    call: GradientCall
    statements: list[cst.BaseStatement]
    repeated: list[str]


def split_losses(
    statements: Sequence[cst.BaseStatement], calls: Sequence[GradientCall]
) -> list[LossPart]:
    """Splits a block by its losses; raises UnusualTapeError if a loss is not assigned in it.

    A statement that an earlier loss computes is reused by a later one if it does not depend on
    the later one's variables. Otherwise both compute it.
    """
    parsed = [parse_statements([one]) for one in statements]
    slices = [_slice(parsed, call.loss_names) for call in calls]
    if not all(slices) or any(call.loss is None for call in calls):
        raise UnusualTapeError("a loss is computed outside of the block")
    # What no loss needs, such as updates of metrics, runs once, with the first one.
    rest = set(range(len(parsed))) - {index for needed in slices for index in needed}
    done: set[int] = set()
    parts: list[LossPart] = []
    for call, needed in zip(calls, slices, strict=True):
        depending = _depending(parsed, needed, call.source_names)
        own = {index for index in needed if index not in done or index in depending}
        repeated = [name for index in sorted(own & done) for name in _stores(parsed[index])]
        own |= set() if parts else rest
        done |= own
        parts.append(LossPart(call, [statements[index] for index in sorted(own)], repeated))
    return parts


def parse_statements(statements: Sequence[cst.BaseStatement]) -> list[ast.stmt]:
    """Parses statements with Python's own parser."""
    return name_uses.parsed("".join(code_of(one) for one in statements))


def _slice(parsed: Sequence[list[ast.stmt]], names: set[str]) -> list[int]:
    """Returns the statements that names are computed by, in order."""
    needed, found = set(names), list[int]()
    for index in reversed(range(len(parsed))):
        if needed & set(_stores(parsed[index])):
            found.append(index)
            needed |= name_uses.free_loads(parsed[index])
    return found[::-1]


def _depending(
    parsed: Sequence[list[ast.stmt]], indices: Sequence[int], names: set[str]
) -> set[int]:
    """Returns the statements that read names, or values computed from them."""
    reached, found = set(names), set[int]()
    for index in indices:
        if reached & name_uses.free_loads(parsed[index]):
            found.add(index)
            reached.update(_stores(parsed[index]))
    return found


def _stores(nodes: Sequence[ast.stmt]) -> list[str]:
    return name_uses.stores(nodes)
