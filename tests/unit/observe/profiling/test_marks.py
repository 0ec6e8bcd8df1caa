"""Marks in a trace that JAX's profiler really writes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from stratagem.observe.profiling.recorder import find_traces
from stratagem.observe.profiling.trace import COMPILATION, END, STEP, input_mark, read_trace


def test_marks_are_read_back_with_operations_and_compilation(tmp_path) -> None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(tmp_path), profiler_options=options):
        with jax.profiler.StepTraceAnnotation(STEP, step_num=7, num_steps=3):
            with input_mark():
                x = jnp.ones((8, 8))
            jax.block_until_ready(jax.jit(lambda x: x @ x + 3)(x))
        with jax.profiler.TraceAnnotation(END):
            pass
    (path,) = find_traces(tmp_path)
    trace = read_trace(path)
    (((begin, end), num_steps),) = trace.steps
    assert num_steps == 3
    assert trace.end_ns is not None
    assert trace.end_ns >= end
    for spans in (trace.input, trace.compilation):
        assert spans
        assert all(begin <= first <= last <= end for first, last in spans)
    (operations,) = trace.devices.values()
    assert {one.module for one in operations} >= {"jit__lambda"}
    assert all(begin <= one.begin_ns < one.end_ns <= end for one in operations)
    assert "backend_compile_and_load" in COMPILATION
