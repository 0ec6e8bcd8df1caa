"""Programs of several processes are compared by shapes and operations, not by names."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.execution.tracing import lost_changes as program_fingerprint
from stratagem.execution.tracing.lost_changes import agree_on_program, name_of
from stratagem.group.current import Identity

X = np.ones(3, np.float32)


class Recorder:
    """A group of two: this process, and one that sent `other`."""

    def __init__(self, other: Any = None) -> None:
        self.identity = Identity(0, ("chief 0", "worker 0"), "h", 1)
        self.other = other
        self.own: Any = None

    def exchange(self, name: str, own: Any) -> list[Any]:
        self.own = own
        return [own, own if self.other is None else self.other]


def fingerprint(monkeypatch, function: Any, *arguments: Any) -> Any:
    recorder = Recorder()
    monkeypatch.setattr(program_fingerprint, "current_group", lambda: recorder)
    agree_on_program("step", jax.make_jaxpr(function)(*arguments))
    return recorder.own


def double(x: Any) -> Any:
    return jnp.sin(x) * 2


def test_same_operations_under_other_names_agree(monkeypatch) -> None:
    def same_again(value: Any) -> Any:
        named = jnp.sin(value)
        return named * 2

    assert fingerprint(monkeypatch, double, X) == fingerprint(monkeypatch, same_again, X)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda x: jnp.cos(x) * 2, "operations"),
        (lambda x: jnp.sin(x) * 3, "operations"),
        (lambda x: jax.lax.cond(True, lambda v: v * 2, lambda v: v * 2, jnp.sin(x)), "operations"),
        (lambda x: (jnp.sin(x) * 2)[:2], "results"),
    ],
    ids=["another function", "another constant", "a branch", "another shape"],
)
def test_another_program_is_refused_with_what_differs(other, what, monkeypatch) -> None:
    theirs = fingerprint(monkeypatch, other, X)
    recorder = Recorder(theirs)
    monkeypatch.setattr(program_fingerprint, "current_group", lambda: recorder)
    with pytest.raises(RuntimeError, match=rf"worker 0 and chief 0 traced .*step: their {what}"):
        agree_on_program("step", jax.make_jaxpr(double)(X))


def test_inner_programs_count(monkeypatch) -> None:
    def loop(step: Any) -> Any:
        return lambda x: jax.lax.fori_loop(0, 3, lambda _, v: step(v), x)

    first = fingerprint(monkeypatch, loop(jnp.sin), X)
    assert first != fingerprint(monkeypatch, loop(jnp.cos), X)
    assert first == fingerprint(monkeypatch, loop(jnp.sin), X)


def test_another_shape_is_refused_as_arguments(monkeypatch) -> None:
    theirs = fingerprint(monkeypatch, double, np.ones(4, np.float32))
    monkeypatch.setattr(program_fingerprint, "current_group", lambda: Recorder(theirs))
    with pytest.raises(RuntimeError, match=r"their arguments are .*float32\[4\].*float32\[3\]"):
        agree_on_program("step", jax.make_jaxpr(double)(X))


def test_functions_are_named_and_other_callables_by_their_class() -> None:
    assert name_of(double) == "double"
    assert name_of(functools.partial(double)) == "partial"
    assert name_of(Recorder().exchange) == "Recorder.exchange"
