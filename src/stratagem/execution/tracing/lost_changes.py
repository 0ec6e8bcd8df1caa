"""Check for changes to arguments that a step would lose, as with Flax NNX modules.

A step receives objects rebuilt from their arrays, so it changes a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from stratagem.execution.tracing.program_fingerprint import name_of
from stratagem.messages import explain

_RECIPE = (
    "give the state to the step and return it: `graph, state = nnx.split(model)` outside, "
    "`model = nnx.merge(graph, state)` and `return nnx.state(model)` inside, "
    "`nnx.update(model, state)` after the last step. To drop a change that does not count, "
    "`nnx.merge(graph, state, copy=True)`."
)
# From the error of Flax versions that refuse changes to a module of an outer trace.
_WORDS_OF_FLAX = "different trace level"


def call_with_copies(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a step; raises RuntimeError if it changed an argument without returning the change."""
    objects = [(one, before) for one in _objects((args, kwargs)) if (before := _arrays(one))]
    try:
        result = fn(*args, **kwargs)
    except Exception as error:
        if _WORDS_OF_FLAX in str(error):
            raise _unreachable(fn) from error
        raise
    returned: set[int] | None = None
    for one, before in objects:
        after = jax.tree.leaves(one)
        changed = set(map(id, after)) - set(map(id, before))
        if not changed and len(after) == len(before):
            continue
        if returned is None:
            returned = set(map(id, jax.tree.leaves(result)))
        if not changed or not changed <= returned:
            raise _lost(fn, one)
    return result


def _objects(tree: object) -> list[Any]:
    """Returns the nodes of a pytree other than dicts, lists and tuples, which may hold state."""
    return [one for one in jax.tree.leaves(tree, is_leaf=_is_object) if _is_object(one)]


def _is_object(node: object) -> bool:
    if node is None or isinstance(node, dict | list | tuple):
        return False
    return not jax.tree_util.all_leaves([node])


def _arrays(one: object) -> list[Any]:
    """Returns the leaves of an object; none if it creates new leaves on every call."""
    leaves, again = jax.tree.leaves(one), jax.tree.leaves(one)
    return leaves if list(map(id, leaves)) == list(map(id, again)) else []


def _lost(fn: Callable[..., Any], one: object) -> RuntimeError:
    return RuntimeError(
        explain(
            f"{name_of(fn)} changed its argument of type {type(one).__name__}, and the change "
            "would be lost, because a step receives a copy.",
            expected="a step that returns the state that it changes.",
            fix=_RECIPE,
            code="SG403",
        )
    )


def _unreachable(fn: Callable[..., Any]) -> RuntimeError:
    return RuntimeError(
        explain(
            f"{name_of(fn)} changed a Flax NNX object created outside it.",
            expected="a step that takes the state as an argument and returns it.",
            fix=_RECIPE,
            code="SG403",
        )
    )
