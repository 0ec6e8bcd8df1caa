"""The stack of contexts, with fake strategies: only their identity matters here."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem import contexts as stack
from stratagem.contexts import (
    ContextFrame,
    FrameKind,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    set_strategy,
)
from stratagem.execution.replica_context import get_replica_context
from tests.fresh_process import run_fresh


class Named:
    """Stands in for a strategy."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    @contextlib.contextmanager
    def scope(self) -> Iterator[Named]:
        stack.push_scope(self)
        try:
            yield self
        finally:
            stack.pop_scope(self)


A = Named("strategy_a")
B = Named("strategy_b")


def in_another_thread(function: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(function).result()


def test_scope_opened_in_merge_call_has_the_replica() -> None:
    replica = object()
    with stack.push(FrameKind.MERGE, A, replica), A.scope():
        assert stack.current_frame() == ContextFrame(FrameKind.SCOPE, A, replica)
        with stack.push_default():
            assert not has_strategy()
            assert in_cross_replica_context()
        assert get_strategy() is A


def test_scope_that_another_thread_opened_cannot_be_left() -> None:
    with A.scope():
        with pytest.raises(RuntimeError, match="was closed while none is the innermost"):
            in_another_thread(lambda: stack.pop_scope(A))
        assert get_strategy() is A


def test_set_strategy_holds_for_every_thread_until_it_is_reset() -> None:
    def place() -> tuple[Any, bool, bool, Any]:
        return get_strategy(), has_strategy(), in_cross_replica_context(), get_replica_context()

    default = get_strategy()
    set_strategy(A)
    try:
        assert place() == (A, True, True, None)
        assert in_another_thread(place) == (A, True, True, None)
        set_strategy(B)
        assert get_strategy() is B
        with B.scope():
            assert get_strategy() is B
        words = r"inside the scope of strategy_b(?s:.)*call sg.set_strategy\(None\) before"
        with pytest.raises(RuntimeError, match=words), A.scope():
            pass
        set_strategy(default)
        assert not has_strategy()
        assert get_replica_context() is not None
        set_strategy(A)
    finally:
        set_strategy(None)
    assert get_strategy() is default


@pytest.mark.slow
def test_default_strategy_is_made_once_and_not_before_it_is_asked_for() -> None:
    program = """
from stratagem import contexts as stack
made = []
stack.set_default(lambda: made.append("made") or "default")
print(made)
print([stack.get_strategy(), stack.get_strategy()], made)
"""
    assert run_fresh(program) == ["[]", "['default', 'default'] ['made']"]


# Uses of strategies, which an `sg.function` counts or refuses.


@pytest.mark.parametrize(
    "use",
    [
        lambda: stack.require_cross_replica(None, "run", instead=""),
        lambda: stack.push_scope(sg.OneDeviceStrategy("cpu:0")),
    ],
    ids=["method", "scope"],
)
def test_uses_are_counted_and_end_a_trace_of_this_thread(use: Callable[[], object]) -> None:
    before = stack.num_uses()
    with stack.refusing_strategies():
        with pytest.raises(stack.StrategyUsed) as caught:
            use()
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            assert threads.submit(stack.note_use).result() is None
    assert not isinstance(caught.value, Exception)
    assert stack.num_uses() == before + 1
    stack.note_use()
    assert stack.num_uses() == before + 2


# `sg.all_gather`, inside and outside of replicas.


def test_all_rows_on_each_replica_and_the_gradient_of_its_own() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    (rows,) = strategy.distribute_dataset([np.asarray([1.0, 2.0, 6.0], "float32")])

    def step(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.asarray([1.0, 10.0, 100.0])
        return jax.value_and_grad(lambda rows: jnp.sum(sg.all_gather(rows) * scale))(rows)

    np.testing.assert_array_equal(sg.all_gather(np.ones((2, 3)), axis=1), np.ones((2, 3)))
    values, gradients = strategy.run(step, args=(rows,))
    assert [float(value) for value in strategy.local_results(values)] == [621.0, 621.0]
    np.testing.assert_array_equal(strategy.gather(gradients, axis=0), [2.0, 20.0, 200.0])


def test_cross_replica_context_is_refused() -> None:
    with (
        sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope(),
        pytest.raises(RuntimeError, match=r"cross-replica.*\n.*\nFix: use strategy.gather"),
    ):
        sg.all_gather(np.ones(2))
