"""Every method in its scope, outside every scope, in a replica, and under a foreign strategy."""

from __future__ import annotations

import re

import jax.numpy as jnp
import pytest

import stratagem as sg


def _open_scope(strategy, _):
    with strategy.scope():
        pass


def _colocate(strategy, variable):
    with strategy.extended.colocate_vars_with(variable):
        pass


# What may be called in cross-replica context only: given the strategy and a variable of it.
CROSS_REPLICA = {
    "scope": _open_scope,
    "run": lambda strategy, _: strategy.run(lambda: 1),
    "reduce": lambda strategy, _: strategy.reduce("mean", 4.0, axis=None),
    "gather": lambda strategy, _: strategy.gather(jnp.ones(1), axis=0),
    "concat": lambda strategy, _: strategy.concat(jnp.ones(1), axis=0),
    "local_results": lambda strategy, _: strategy.local_results(4.0),
    "experimental_local_results": lambda strategy, _: strategy.experimental_local_results(4.0),
    "distribute_values_from_function": (
        lambda strategy, _: strategy.distribute_values_from_function(lambda _: 4.0)
    ),
    "extended.reduce_to": lambda strategy, v: strategy.extended.reduce_to("mean", 4.0, v),
    "extended.batch_reduce_to": (
        lambda strategy, v: strategy.extended.batch_reduce_to("mean", [(4.0, v)])
    ),
    "extended.broadcast_to": lambda strategy, v: strategy.extended.broadcast_to(4.0, v),
    "extended.update": lambda strategy, v: strategy.extended.update(v, lambda c: c.assign(2.0)),
    "extended.colocate_vars_with": _colocate,
}
# What may be asked anywhere.
ANYWHERE = {
    "num_replicas_in_sync": lambda strategy, _: strategy.num_replicas_in_sync,
    "cluster_resolver": lambda strategy, _: strategy.cluster_resolver,
    "extended.experimental_require_static_shapes": (
        lambda strategy, _: strategy.extended.experimental_require_static_shapes
    ),
    "extended.variable_created_in_scope": (
        lambda strategy, v: strategy.extended.variable_created_in_scope(v)
    ),
    "extended.value_container": lambda strategy, v: strategy.extended.value_container(v) is v,
    "repr": lambda strategy, _: repr(strategy),
}


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return sg.Variable(1.0)


@pytest.mark.parametrize("method", [*CROSS_REPLICA, *ANYWHERE])
def test_method_works_in_its_scope_and_outside_every_scope(strategy, variable, method) -> None:
    call = {**CROSS_REPLICA, **ANYWHERE}[method]
    outside = call(strategy, variable)
    with strategy.scope():
        inside = call(strategy, variable)
    assert type(inside) is type(outside)
    if method in ANYWHERE:
        assert inside == outside


@pytest.mark.parametrize("method", CROSS_REPLICA)
def test_method_under_a_foreign_strategy_raises_naming_both(
    strategy, foreign, variable, method
) -> None:
    names = f"{re.escape(repr(strategy))}.* inside the scope of {re.escape(repr(foreign))}"
    with foreign.scope(), pytest.raises(RuntimeError, match=names):
        CROSS_REPLICA[method](strategy, variable)
    assert not sg.has_strategy()


@pytest.mark.parametrize("method", CROSS_REPLICA)
def test_method_in_replica_context_raises_naming_what_works(strategy, variable, method) -> None:
    """At each of them the replica function ends, so that nothing is compiled."""
    with pytest.raises(RuntimeError, match=r"(?s)in replica context\..*Fix: "):
        strategy.run(lambda: CROSS_REPLICA[method](strategy, variable))
    assert not sg.has_strategy()


def test_methods_in_replica_context_raise_eagerly_too(strategy, variable) -> None:
    sg.config.run_eagerly(True)
    try:
        for call in CROSS_REPLICA.values():
            with pytest.raises(RuntimeError, match="in replica context"):
                strategy.run(lambda call=call: call(strategy, variable))
    finally:
        sg.config.run_eagerly(False)


@pytest.mark.parametrize("method", ANYWHERE)
def test_question_may_be_asked_under_a_foreign_strategy_and_in_a_replica(
    strategy, foreign, variable, method
) -> None:
    expected = ANYWHERE[method](strategy, variable)
    with foreign.scope():
        assert ANYWHERE[method](strategy, variable) == expected
    answers = []
    strategy.run(lambda: answers.append(ANYWHERE[method](strategy, variable)))
    assert answers == [expected]


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        ("reduce", "merge_call"),
        ("gather", "all_gather"),
        ("extended.reduce_to", "merge_call"),
        ("extended.update", "merge_call"),
    ],
)
def test_error_in_replica_context_names_the_call_that_works(
    strategy, variable, method, instead
) -> None:
    with pytest.raises(RuntimeError, match=rf"(?s)in replica context.*{instead}"):
        strategy.run(lambda: CROSS_REPLICA[method](strategy, variable))


@pytest.mark.parametrize(
    ("method", "call", "instead"),
    [
        ("merge_call", lambda context: context.merge_call(lambda _: 1), "strategy.run"),
        ("all_reduce", lambda context: context.all_reduce("sum", 1.0), "strategy.reduce"),
        ("all_gather", lambda context: context.all_gather(jnp.ones(1), 0), "strategy.gather"),
    ],
)
def test_replica_method_in_cross_replica_context_names_the_call_that_works(
    strategy, method, call, instead
) -> None:
    contexts = []
    strategy.run(lambda: contexts.append(sg.get_replica_context()))
    words = rf"(?s)ReplicaContext.{method} was called in cross-replica context.*{instead}"
    with strategy.scope(), pytest.raises(RuntimeError, match=words):
        call(contexts[0])
