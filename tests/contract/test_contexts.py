"""Where a call stands: the table of contexts, the stack, and what a replica knows of itself."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem import contexts as stack
from tests.contract.parts import assert_parts, replica_ids, split


@dataclasses.dataclass(frozen=True)
class Place:
    """What the functions of the table of contexts answer at one place."""

    has_strategy: bool
    is_cross_replica: bool
    has_replica_context: bool
    strategy: Any


def here() -> Place:
    return Place(
        sg.has_strategy(),
        sg.in_cross_replica_context(),
        sg.get_replica_context() is not None,
        sg.get_strategy(),
    )


def cross_replica(strategy: sg.Strategy) -> Place:
    return Place(_is_not_default(strategy), True, False, strategy)


def in_replica(strategy: sg.Strategy) -> Place:
    return Place(_is_not_default(strategy), False, True, strategy)


def _is_not_default(strategy: sg.Strategy) -> bool:
    return strategy is not sg.get_strategy()  # called outside every scope


def test_outside_every_scope_the_default_strategy_is_current() -> None:
    default = sg.get_strategy()
    assert here() == Place(False, False, True, default)
    assert sg.get_strategy() is default
    context = sg.get_replica_context()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)


def test_scope_makes_the_strategy_current_in_cross_replica_context(strategy) -> None:
    expected, before = cross_replica(strategy), here()
    with strategy.scope() as entered:
        assert entered is strategy
        assert here() == expected
    assert here() == before


def test_scope_may_be_opened_again_inside_itself(strategy) -> None:
    expected = cross_replica(strategy)
    with strategy.scope():
        with strategy.scope():
            assert here() == expected
        assert here() == expected
    assert sg.get_strategy() is not strategy or not sg.has_strategy()


def test_scope_ends_with_an_exception_that_leaves_it(strategy) -> None:
    before = here()
    with pytest.raises(KeyError, match="from inside"), strategy.scope():
        raise KeyError("from inside")
    assert here() == before


def test_contexts_in_run_merge_call_and_update(strategy, execution) -> None:
    crossing, inside = cross_replica(strategy), in_replica(strategy)
    with strategy.scope():
        variable = sg.Variable(1.0)
    seen: dict[str, list[Place]] = {"run": [], "merge": [], "update": [], "scope": [], "after": []}

    def update(component):
        seen["update"].append(here())
        component.assign_add(1.0)

    def merge(merged):
        assert merged is strategy
        seen["merge"].append(here())
        strategy.extended.update(variable, update)
        with strategy.scope():
            seen["scope"].append(here())

    def step():
        seen["run"].append(here())
        sg.get_replica_context().merge_call(merge)
        seen["after"].append(here())

    strategy.run(step)
    assert set(seen.pop("run") + seen.pop("after")) == {inside}
    assert {name: set(places) for name, places in seen.items()} == {
        name: {crossing} for name in ("merge", "update", "scope")
    }
    assert float(variable.value) == 2.0


def test_update_outside_run_is_cross_replica_context(strategy) -> None:
    expected = cross_replica(strategy)
    with strategy.scope():
        variable = sg.Variable(1.0)
    assert strategy.extended.update(variable, lambda _: here()) == expected


def test_run_outside_the_scope_opens_it(strategy, execution) -> None:
    expected = in_replica(strategy)
    seen = []
    strategy.run(lambda: seen.append(here()))
    assert set(seen) == {expected}
    assert not sg.has_strategy()


def test_replica_context_knows_its_replica(strategy, execution) -> None:
    count = strategy.num_replicas_in_sync

    def step():
        context = sg.get_replica_context()
        assert context.strategy is strategy
        assert context.num_replicas_in_sync == count
        assert sg.get_replica_context() is context
        return context.replica_id_in_sync_group

    assert_parts(strategy, strategy.run(step), lambda i: i)


def test_replica_id_is_traced_when_compiled_and_an_int_when_eager(distributing, execution) -> None:
    kinds = []
    distributing.run(lambda: kinds.append(type(sg.get_replica_context().replica_id_in_sync_group)))
    if execution == "eager":
        assert kinds == [int] * len(replica_ids(distributing))
    else:
        assert len(kinds) == 1
        assert issubclass(kinds[0], jax.core.Tracer)


def test_branching_on_the_replica_id_in_a_compiled_step_names_the_ways_out(distributing) -> None:
    def step():
        return 1.0 if sg.get_replica_context().replica_id_in_sync_group == 0 else 2.0

    with pytest.raises(Exception, match=r"(?s)lax\.cond.*run_eagerly"):
        distributing.run(step)


def test_branching_on_the_replica_id_works_eagerly(distributing) -> None:
    sg.config.run_eagerly(True)
    try:
        value = distributing.run(
            lambda: 1.0 if sg.get_replica_context().replica_id_in_sync_group == 0 else 2.0
        )
    finally:
        sg.config.run_eagerly(False)
    assert_parts(distributing, value, lambda i: 1.0 if i == 0 else 2.0)


def test_examples_are_the_rows_of_the_batch(strategy, execution) -> None:
    rows = split(strategy, lambda i: jnp.full((3, 2), float(i)))
    facts = []

    def step(_):
        context = sg.get_replica_context()
        facts.append((context.num_examples, context.global_num_examples))
        return context.example_mask

    mask = strategy.run(step, args=(rows,))
    assert set(facts) == {(3, 3 * strategy.num_replicas_in_sync)}
    assert_parts(strategy, mask, lambda _: np.ones(3, bool))


def test_examples_are_unknown_without_a_batch(strategy, execution) -> None:
    def step():
        context = sg.get_replica_context()
        assert context.num_examples is None
        assert context.global_num_examples is None
        assert context.example_mask is None

    strategy.run(step)


def test_set_strategy_makes_it_current_without_a_scope(strategy) -> None:
    expected = cross_replica(strategy)
    sg.set_strategy(strategy)
    try:
        if expected.has_strategy:
            assert here() == expected
            assert strategy.run(lambda: 7) == 7
        else:
            assert here() == Place(False, False, True, strategy)
    finally:
        sg.set_strategy(None)
    assert not sg.has_strategy()
    assert sg.experimental_set_strategy is sg.set_strategy


def test_set_strategy_inside_a_scope_is_refused(strategy) -> None:
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match="set_strategy was called inside a scope"),
    ):
        sg.set_strategy(strategy)


def test_set_strategy_takes_only_strategies() -> None:
    with pytest.raises(TypeError, match="received 'mirrored' of type str"):
        sg.set_strategy("mirrored")


def test_each_thread_has_its_own_stack(strategy) -> None:
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(here()))
        thread.start()
        thread.join()
    assert seen == [here()]


def test_scopes_left_in_the_wrong_order_are_reported(strategy) -> None:
    with strategy.scope():
        variable = sg.Variable(1.0)
    scope = strategy.scope()
    scope.__enter__()
    try:
        with pytest.raises(RuntimeError, match="is the innermost one"):
            strategy.extended.update(variable, lambda _: scope.__exit__(None, None, None))
    finally:
        stack.pop_scope(strategy)
