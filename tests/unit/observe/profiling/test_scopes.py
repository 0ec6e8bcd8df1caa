"""Layers and passes read from scopes as JAX and Keras write them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from stratagem.observe.profiling.summary import every_steps, instructions_of, layer_of, period_of

_PROGRAM = """
HloModule jit__one_step, is_scheduled=true

%fused_computation.1 (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %neg.1 = f32[4]{0} negate(%p), metadata={op_name="jit(step)/jvp(model)/dense/neg"}
  ROOT %add.1 = f32[4]{0} add(%neg.1, %p), metadata={op_name="jit(step)/jvp(model)/dense/neg"}
}

ENTRY %main.1 (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0), metadata={op_name="arrays[0][1]"}
  %fusion = f32[4]{0:T(8,128)} fusion(%x), kind=kLoop, calls=%fused_computation.1
  %psum.3 = (f32[4]{0}, f32[2]{0}) all-reduce(%fusion, %x), metadata={op_name="jit(step)/psum"}
  ROOT %copy.2 = f32[4]{0} copy(%fusion)
}
"""


@pytest.mark.parametrize(
    ("scope", "layer", "phase"),
    [
        (
            "jit(_one_step)/shard_map/jvp(sequential)/dense/dot_general",
            "sequential/dense",
            "forward",
        ),
        (
            "jit(_one_step)/shard_map/transpose(jvp(sequential))/dense_1/jit(relu)/max",
            "sequential/dense_1",
            "backward",
        ),
        ("jit(train_step)/jvp()/dense_3/dot_general", "dense_3", "forward"),
        ("jit(_one_step)/shard_map/adam/sub", "adam", ""),
        ("jit(_many_steps)/while/body/closed_call/adam/add", "adam", ""),
        (
            "jit(step)/transpose(jvp(model))/rematted_computation/block/add",
            "model/block",
            "backward",
        ),
        ("jit(_one_step)/shard_map/psum", "", ""),
        ("arrays[0][19]", "", ""),
        ("", "", ""),
    ],
)
def test_layers_and_passes(scope, layer, phase) -> None:
    assert layer_of(scope) == (layer, phase)


def test_instructions_have_their_kind_and_scope() -> None:
    found = instructions_of(_PROGRAM)
    assert found["psum.3"] == ("all-reduce", "jit(step)/psum")
    # A fusion without a scope has the one that is most common inside.
    assert found["fusion"] == ("fusion", "jit(step)/jvp(model)/dense/neg")
    assert found["copy.2"] == ("copy", "")


def test_text_without_instructions_has_none() -> None:
    assert instructions_of("HloModule jit_step\n") == {}


def test_period_is_read_from_the_compiled_program() -> None:
    def step(number, array):
        with every_steps(25):
            return jax.lax.cond(number % 25 == 0, jnp.sin, lambda x: x, array)

    text = jax.jit(step).lower(1, jnp.ones(3)).compile().as_text()
    (line,) = [line for line in text.splitlines() if " conditional(" in line]
    assert period_of(line) == 25
    assert {period_of(line) for line in text.splitlines() if "iota" in line} <= {1, 25}


def test_what_has_no_period_is_done_in_every_step() -> None:
    assert period_of('metadata={op_name="jit(step)/every_25_steps/dense/dot_general"}') == 1
