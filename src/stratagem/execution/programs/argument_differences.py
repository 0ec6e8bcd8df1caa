"""Differences between the arguments of two calls that need different programs."""

from __future__ import annotations

import reprlib
from typing import Any, NamedTuple

import jax

from stratagem.execution.tracing.arguments import Leaf, Static


class ArgumentKinds(NamedTuple):
    """Structure of `(args, kwargs)`, and what each leaf contributes to the program."""

    structure: Any
    kinds: tuple[Any, ...]  # `Leaf`, `Static`, or (shape, dtype, is_weak)


def differences(before: ArgumentKinds, after: ArgumentKinds) -> list[str]:
    """Returns one line per differing argument, as "args[0]: float32[4] -> float32[3]"."""
    if before.structure != after.structure:
        return [f"arguments: {_tree_text(before)} -> {_tree_text(after)}"]
    pairs = zip(before.kinds, after.kinds, _names(after.structure), strict=True)
    return [f"{name}: {_change(old, new)}" for old, new, name in pairs if old != new]


def _names(structure: Any) -> list[str]:
    """Returns the name of each leaf as an expression, such as "args[0]['x']"."""
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]
    return [
        ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])  # pyright: ignore[reportAttributeAccessIssue]
        for path in paths
    ]


def _tree_text(arguments: ArgumentKinds) -> str:
    texts = map(_text, arguments.kinds)
    return reprlib.repr([*map(": ".join, zip(_names(arguments.structure), texts, strict=True))])


def _change(before: Any, after: Any) -> str:
    old, new = _text(before), _text(after)
    if old != new:
        return f"{old} -> {new}"
    if _static(before) is not None:
        return f"another object, {new}"
    pairs = zip(_traits(before), _traits(after), strict=True)
    return f"{old}: " + ", ".join(f"{one} -> {other}" for one, other in pairs if one != other)


def _traits(kind: Any) -> list[str]:
    """Returns what `_text` leaves out of an array."""
    is_weak = kind.is_weak if isinstance(kind, Leaf) else kind[2]
    traits = ["Python number" if is_weak else "array"]
    if isinstance(kind, Leaf):
        traits.append("per replica" if kind.split else "shared")
        traits.append("all rows" if kind.lengths is None else f"rows {kind.lengths}")
    return traits


def _static(kind: Any) -> Static | None:
    return kind.static if isinstance(kind, Leaf) else kind if isinstance(kind, Static) else None


def _text(kind: Any) -> str:
    if (static := _static(kind)) is not None:
        return reprlib.repr(static.value)
    shape, dtype = (kind.shape or (), kind.dtype) if isinstance(kind, Leaf) else kind[:2]
    sizes = ",".join(map(str, shape))
    return f"{dtype}[{sizes}]"
