"""Check for changes to arguments that a step would lose, as with Flax NNX modules.

A step receives objects rebuilt from their arrays, so it changes a copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from stratagem.errors import explain
from stratagem.execution.jaxprs import inner_jaxprs
from stratagem.group.current import current_group

# Program fingerprint: checks that all processes compiled the same program.
#
# Different programs would exchange unrelated data or deadlock.


def name_of(fn: Callable[..., Any]) -> str:
    """Returns the name of a function for messages."""
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def agree_on_program(name: str, jaxpr: ClosedJaxpr) -> None:
    """Compares a program with those of the other processes; raises RuntimeError if one differs."""
    group = current_group()
    assert group is not None
    own = {
        "arguments": str([str(aval) for aval in jaxpr.in_avals]),
        "results": str([str(aval) for aval in jaxpr.out_avals]),
        "operations": operations_digest(jaxpr),
    }
    received = group.exchange(f"the program of {name}", own)
    for label, other in zip(group.identity.labels, received, strict=True):
        for what, value in other.items():
            if value != received[0][what]:
                raise RuntimeError(
                    explain(
                        f"{label} and {group.identity.labels[0]} traced different programs for "
                        f"{name}: their {what} are {value} and {received[0][what]}.",
                        expected="the same program on all processes.",
                        fix="compare the functions and their arguments: find a condition on the "
                        "process, another batch size, or an option set on one process only.",
                        code="SG402",
                    )
                )


def operations_digest(jaxpr: ClosedJaxpr) -> str:
    """Returns a digest of the operations of a program, without names that differ by process."""
    digest = hashlib.sha256()
    for line in _lines(jaxpr.jaxpr):
        digest.update(line.encode())
    return digest.hexdigest()[:12]


def _lines(jaxpr: Jaxpr) -> Iterator[str]:
    """Yields the operations of a program, without names and addresses that differ by process."""
    for eqn in jaxpr.eqns:
        constants = [str(atom.val) for atom in eqn.invars if isinstance(atom, Literal)]
        yield f"{eqn.primitive.name} {constants} {[str(var.aval) for var in eqn.outvars]}"
        for inner in inner_jaxprs(eqn):
            yield from _lines(inner)


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
