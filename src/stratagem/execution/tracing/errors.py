"""Errors in replica functions, found during tracing or eager execution.

A step receives objects rebuilt from their arrays, such as Flax NNX modules. It would change a copy,
so a change to an argument is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from stratagem.errors import explain, invalid
from stratagem.execution.jaxprs import inner_jaxprs
from stratagem.group.current import current_group

if TYPE_CHECKING:
    import keras


BRANCHING = (
    "In a compiled replica function values, the replica id among them, are known only when it "
    "runs. "
    "Fix: choose with jax.numpy.where or lax.cond, or debug with sg.config.run_eagerly(True)."
)


def parted(strategy: object) -> RuntimeError:
    """Returns the error for replicas that would deadlock."""
    return RuntimeError(
        explain(
            f"A replica function of {strategy} calls all_reduce, all_gather or merge_call in a "
            "branch of lax.cond, or in a lax.while_loop, that not every replica may take.",
            expected="the same calls on every replica; otherwise the others wait forever.",
            fix="call it outside the branch and select with jax.numpy.where, or branch on a value "
            "that is equal on all replicas: all_reduce it first.",
            code="SG406",
        )
    )


def apart(kinds: list[str]) -> RuntimeError:
    """Returns the error for replicas that make different calls, given the call of each replica."""
    return RuntimeError(
        explain(
            f"Replicas made different calls: {kinds}, in replica order.",
            expected="the same calls of merge_call, all_reduce and all_gather, in the same order.",
            fix="make these calls on every replica, and vary only the values.",
            code="SG406",
        )
    )


def created_again(variable: Any) -> ValueError:
    """Returns the error for a replica function that creates a variable on every call."""
    return invalid(
        f"A replica function created variable {variable.path!r}, and another one on its second "
        "call.",
        expected="variables created only on the first call.",
        fix="create it outside, or once: `if holder.v is None: holder.v = sg.Variable(...)`.",
        code="SG207",
    )


def eager_abstract(strategy: object) -> ValueError:
    """Returns the error for a step op by op on abstract devices."""
    return invalid(
        f"Cannot run a step op by op on {strategy}: its devices are abstract.",
        expected="compiled steps, which can be planned without devices.",
        fix="remove run_eagerly, or call sg.config.run_eagerly(False).",
        code="SG411",
    )


def eager_over_processes() -> NotImplementedError:
    """Returns the error for a step op by op on replicas that span processes."""
    return NotImplementedError(
        explain(
            "Cannot run a step op by op on replicas that span several processes.",
            expected="compiled steps: an eager replica computes on one device of one process.",
            fix="debug the function in one process, or call sg.config.run_eagerly(False).",
            code="SG411",
        )
    )


def eager_remote() -> RuntimeError:
    """Returns the error for a step op by op with parameter servers."""
    return RuntimeError(
        explain(
            "Cannot run a step of a ParameterServerStrategy op by op.",
            expected="compiled steps, which list in advance what they need from the servers.",
            fix="debug the function under sg.OneDeviceStrategy, or call "
            "sg.config.run_eagerly(False).",
            code="SG411",
        )
    )


def foreign_variable(variable: Any, owner: object, user: object) -> ValueError:
    """Returns the error for a variable owned by another strategy."""
    return invalid(
        f"Variable {variable.path!r} belongs to {owner} and was used in a step of {user}.",
        expected="variables of the strategy that runs the step.",
        fix="create the model and the optimizer in the scope of the strategy that runs them.",
        code="SG201",
    )


def disagreement(variable: keras.Variable, strategy: object) -> ValueError:
    """Returns the error for an assignment that would make replicas of a variable diverge."""
    return invalid(
        f"A replica function of {strategy} assigned variable {variable.path!r}, whose "
        "aggregation is NONE, a value that may differ between replicas.",
        expected="an aggregation, or a value that is equal on all replicas.",
        fix='create it with aggregation="sum", "mean" or "only_first_replica"; or with '
        'synchronization="on_read" to store one value per replica; or reduce the value first '
        "(all_reduce); or assign it in merge_call with strategy.extended.update.",
        code="SG204",
    )


def captured_explicit(name: str) -> ValueError:
    """Returns the error for a step that uses an array whose type names another mesh."""
    return invalid(
        f"{name} uses an array from outside that is sharded over the explicit axes of a mesh.",
        expected="arrays of that kind among the arguments of `run`, which moves them to the "
        "strategy's devices.",
        fix="pass it to the step: strategy.run(step, args=(batch, array)).",
    )


def explicit_in_jit(name: str) -> ValueError:
    """Returns the error for an argument that `jax.jit` traces with a type that names a mesh."""
    return invalid(
        f"{name} was called inside jax.jit with an array that is sharded over the explicit "
        "axes of a mesh.",
        expected="a call outside of jax.jit, where such an array moves to the strategy's devices.",
        fix="call strategy.run outside of jax.jit (it compiles by itself), or use sg.function "
        "in place of jax.jit.",
    )


def assigned_under_jit(variable: keras.Variable) -> RuntimeError:
    """Returns the error for an assignment that an outer `jax.jit` would lose."""
    return RuntimeError(
        explain(
            f"strategy.run was called inside jax.jit and assigns variable {variable.path!r}.",
            expected="no assignments to Keras variables under jax.jit, which would lose them.",
            fix="call strategy.run outside jax.jit (it compiles by itself), use sg.function in "
            "place of jax.jit, or pass the state as pytrees.",
            code="SG203",
        )
    )


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
