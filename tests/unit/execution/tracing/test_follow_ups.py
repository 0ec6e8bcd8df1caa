"""Follow-ups: taken only where something follows a step, and only if the step needs no result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.execution.tracing.functionalize import FollowUps, ReplicaScope, taking_follow_ups


class Work:
    def before_step(self) -> None:
        pass

    def after_step(self) -> None:
        pass


def test_work_is_left_only_in_the_block() -> None:
    work = Work()
    assert not FollowUps().leave(work, frozenset())
    with taking_follow_ups():
        follow_ups = FollowUps()
        assert follow_ups.leave(work, frozenset())
    assert follow_ups.work == [work]
    assert not FollowUps().leave(work, frozenset())


def test_a_second_work_is_done_in_the_step_and_needs_the_first() -> None:
    with taking_follow_ups():
        follow_ups = FollowUps()
        assert follow_ups.leave(Work(), frozenset())
        assert not follow_ups.leave(Work(), frozenset())
    assert follow_ups.are_needed


def scope_of(*variables):
    values = {id(one): jnp.asarray(one.value) for one in variables}
    return ReplicaScope(lambda variable: values.get(id(variable)))


def test_a_later_read_or_assignment_of_a_changed_variable_needs_the_work() -> None:
    changed, other = keras.Variable(np.ones(2)), keras.Variable(np.ones(2))
    for use, is_needed in (
        (lambda: other.value, False),
        (lambda: other.assign(jnp.zeros(2)), False),
        (lambda: changed.value, True),
        (lambda: changed.assign(jnp.zeros(2)), True),
    ):
        with taking_follow_ups(), scope_of(changed, other) as scope:
            _ = changed.value  # before
            assert scope.leave(Work(), [changed])
            use()
        assert scope.follow_ups.are_needed is is_needed


def test_work_is_not_left_inside_of_control_flow() -> None:
    variable, left = keras.Variable(np.ones(2)), []
    with taking_follow_ups(), scope_of(variable) as scope:

        def inside(value):
            left.append(scope.leave(Work(), [variable]))
            return value

        jax.lax.cond(True, inside, inside, jnp.ones(2))
    assert left
    assert not any(left)
