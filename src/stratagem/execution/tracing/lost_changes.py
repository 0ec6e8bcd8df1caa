"""Objects that a step changes where the change would be lost: modules of Flax NNX and their like.

An argument of a step is rebuilt from its arrays, so that the step changes a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from stratagem.execution.tracing.program_fingerprint import name_of
from stratagem.messages import explain

__all__ = ["call_with_copies"]

_RECIPE = (
    "give the state to the step and return it: `graph, state = nnx.split(model)` outside, "
    "`model = nnx.merge(graph, state)` and `return nnx.state(model)` inside, "
    "`nnx.update(model, state)` after the last step. To drop a change that does not count, "
    "`nnx.merge(graph, state, copy=True)`."
)
# Of a Flax that forbids to change a module of an outer trace.
_WORDS_OF_FLAX = "different trace level"


def call_with_copies(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a step with arguments that were rebuilt for it.

    Args:
        fn: the step.
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        The result of `fn`.

    Raises:
        RuntimeError: `fn` changes an object whose change would be lost.
    """
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


def _objects(tree: Any) -> list[Any]:
    """The nodes of a pytree that are no dict, list or tuple: what may have a state of its own."""
    return [one for one in jax.tree.leaves(tree, is_leaf=_is_object) if _is_object(one)]


def _is_object(node: Any) -> bool:
    if node is None or isinstance(node, dict | list | tuple):
        return False
    return not jax.tree_util.all_leaves([node])


def _arrays(one: Any) -> list[Any]:
    """The leaves of an object; none where it makes new ones whenever it is asked."""
    leaves, again = jax.tree.leaves(one), jax.tree.leaves(one)
    return leaves if list(map(id, leaves)) == list(map(id, again)) else []


def _lost(fn: Callable[..., Any], one: Any) -> RuntimeError:
    return RuntimeError(
        explain(
            f"{name_of(fn)} changed its argument of type {type(one).__name__}, and the change "
            "would be lost: a step changes a copy.",
            expected="a step that returns what it changes.",
            fix=_RECIPE,
        )
    )


def _unreachable(fn: Callable[..., Any]) -> RuntimeError:
    return RuntimeError(
        explain(
            f"{name_of(fn)} changed a Flax NNX object that it did not make.",
            expected="a step that gets the state as an argument and returns it.",
            fix=_RECIPE,
        )
    )
