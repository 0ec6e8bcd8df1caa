"""Errors in replica functions, found during tracing or eager execution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.errors import explain

if TYPE_CHECKING:
    import keras

    from stratagem.variables.registry import StoredVariable


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


def created_again(variable: StoredVariable) -> ValueError:
    """Returns the error for a replica function that creates a variable on every call."""
    return ValueError(
        explain(
            f"A replica function created variable {variable.path!r}, and another one on its second "
            "call.",
            expected="variables created only on the first call.",
            fix="create it outside, or once: `if holder.v is None: holder.v = sg.Variable(...)`.",
            code="SG207",
        )
    )


def eager_abstract(strategy: object) -> ValueError:
    """Returns the error for a step op by op on abstract devices."""
    return ValueError(
        explain(
            f"Cannot run a step op by op on {strategy}: its devices are abstract.",
            expected="compiled steps, which can be planned without devices.",
            fix="remove run_eagerly, or call sg.config.run_eagerly(False).",
            code="SG411",
        )
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
    return ValueError(
        explain(
            f"Variable {variable.path!r} belongs to {owner} and was used in a step of {user}.",
            expected="variables of the strategy that runs the step.",
            fix="create the model and the optimizer in the scope of the strategy that runs them.",
            code="SG201",
        )
    )


def disagreement(variable: keras.Variable, strategy: object) -> ValueError:
    """Returns the error for an assignment that would make replicas of a variable diverge."""
    return ValueError(
        explain(
            f"A replica function of {strategy} assigned variable {variable.path!r}, whose "
            "aggregation is NONE, a value that may differ between replicas.",
            expected="an aggregation, or a value that is equal on all replicas.",
            fix='create it with aggregation="sum", "mean" or "only_first_replica"; or with '
            'synchronization="on_read" to store one value per replica; or reduce the value first '
            "(all_reduce); or assign it in merge_call with strategy.extended.update.",
            code="SG204",
        )
    )


def captured_explicit(name: str) -> ValueError:
    """Returns the error for a step that uses an array whose type names another mesh."""
    return ValueError(
        explain(
            f"{name} uses an array from outside that is sharded over the explicit axes of a mesh.",
            expected="arrays of that kind among the arguments of `run`, which moves them to the "
            "strategy's devices.",
            fix="pass it to the step: strategy.run(step, args=(batch, array)).",
        )
    )


def explicit_in_jit(name: str) -> ValueError:
    """Returns the error for an argument that `jax.jit` traces with a type that names a mesh."""
    return ValueError(
        explain(
            f"{name} was called inside jax.jit with an array that is sharded over the explicit "
            "axes of a mesh.",
            expected="a call outside of jax.jit, where such an array moves to the strategy's "
            "devices.",
            fix="call strategy.run outside of jax.jit (it compiles by itself), or use sg.function "
            "in place of jax.jit.",
        )
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
