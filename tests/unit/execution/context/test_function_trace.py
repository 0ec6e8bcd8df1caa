"""Reads and assignments of variables that a trace of an `sg.function` records."""

from __future__ import annotations

import concurrent.futures

import pytest

from stratagem.contexts import (
    FunctionTrace,
    KnownBuilds,
    NeedsInitialization,
    current_function_trace,
    tracing_function,
)


class Variable:
    """Anything with an identity."""


def test_input_is_read_and_a_value_that_was_assigned_is_read_again() -> None:
    variable = Variable()
    trace = FunctionTrace({id(variable): "input"})
    assert trace.load(variable, "stored") == "input"
    trace.store(variable, "assigned")
    assert trace.load(variable, "stored") == trace.value_of(variable) == "assigned"
    assert list(trace.read.values()) == list(trace.written.values()) == [variable]
    assert not trace.missed


def test_variable_that_is_no_input_is_missed_and_has_its_stored_value() -> None:
    read, written, empty = Variable(), Variable(), Variable()
    trace = FunctionTrace({})
    assert trace.load(read, "stored") == "stored"
    trace.store(written, "assigned")
    assert trace.load(empty, None) is None
    assert list(trace.missed.values()) == [read, written]
    assert not trace.read
    assert trace.load(written, "stored") == "assigned"


def test_variable_that_was_not_assigned_has_no_value_at_the_end() -> None:
    with pytest.raises(KeyError):
        FunctionTrace({}).value_of(Variable())


def test_strategy_is_recorded_once() -> None:
    trace, strategy = FunctionTrace({}), object()
    for _ in range(2):
        trace.note_strategy(strategy)
    assert trace.strategies == [strategy]
    builds = KnownBuilds(["layer"])
    assert FunctionTrace({}, builds).builds is builds


def test_current_trace_is_the_innermost_of_its_thread() -> None:
    outer, inner = FunctionTrace({}), FunctionTrace({})
    with tracing_function(outer):
        with tracing_function(inner):
            assert current_function_trace() is inner
        with pytest.raises(NeedsInitialization) as caught, tracing_function(inner):
            raise NeedsInitialization(["layer"])
        assert caught.value.builds == ["layer"]
        assert not isinstance(caught.value, Exception)
        assert current_function_trace() is outer
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            assert threads.submit(current_function_trace).result() is None
    assert current_function_trace() is None
