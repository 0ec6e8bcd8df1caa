"""Generation by KerasHub's samplers, a few tokens per program.

A sampler's loop over tokens is one call of its `run_loop`. The first program computes what the loop
begins with, the second continues it. The cache stays on the devices between them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.keras.training.generation import place_prompts
from stratagem.keras.variables.stored_reads import reading_as_stored
from stratagem.messages import explain

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


TOKEN_IDS, _PADDING_MASK = "token_ids", "padding_mask"


class Tokens(NamedTuple):
    """Results of the generate step so far; columns from `start` to `end` are new."""

    token_ids: np.ndarray
    padding_mask: np.ndarray
    start: int
    end: int


class _SamplerLoop(NamedTuple):
    """Variables of a sampler's loop between two programs."""

    variables: Any
    remaining: jax.Array
    is_done: jax.Array


def generate_stepwise(
    model: Any, prompts: Any, stop_token_ids: tuple[int, ...] | None, count: int
) -> Generator[Tokens]:
    """Yields the tokens of a batch as they are computed, `count` at a time."""
    generate = model.make_generate_function()
    programs = _programs_of(model)
    strategy, prompts = place_prompts(generate, prompts)
    prompts = jax.tree.map(keras.ops.convert_to_tensor, prompts)
    loop = programs.begin(strategy, prompts, stop_token_ids)
    remaining, is_done = jax.device_get((loop.remaining, loop.is_done))
    while not is_done:
        start = remaining
        outputs, loop = programs.advance(strategy, prompts, stop_token_ids, loop, count)
        (token_ids, mask), remaining, is_done = jax.device_get(
            (outputs, loop.remaining, loop.is_done)
        )
        length = token_ids.shape[1]
        yield Tokens(token_ids, mask, length - int(start), length - int(remaining))


class _Programs:
    """Compiled programs of a model with one sampler."""

    def __init__(self, model: Any) -> None:
        self.function_of = weakref.ref(model.generate_function)
        self._model: Any = weakref.ref(model)
        self._begin = jax.jit(self._traced_begin, static_argnames="stop_token_ids")
        self._advance = functools.cache(self._compiled_advance)

    def begin(self, strategy: Strategy | None, prompts: Any, stop_token_ids: Any) -> _SamplerLoop:
        """Returns the loop before its first token."""
        state = self._read(strategy)
        return self._begin(prompts, state, stop_token_ids=stop_token_ids)

    def advance(
        self,
        strategy: Strategy | None,
        prompts: Any,
        stop_token_ids: Any,
        loop: _SamplerLoop,
        count: int,
    ) -> tuple[Any, _SamplerLoop]:
        """Computes up to `count` tokens more; returns the generate step's results so far."""
        leaves, structure = jax.tree.flatten(loop)
        places = None if strategy is None else tuple(leaf.sharding for leaf in leaves)
        advance = self._advance(places, structure)
        outputs, loop, seeds = advance(
            loop, prompts, self._read(strategy), count, stop_token_ids=stop_token_ids
        )
        for variable, seed in zip(self._model().sampler.variables, seeds, strict=True):
            variable.assign(seed)
        return outputs, loop

    def _compiled_advance(self, places: tuple[Any, ...] | None, structure: Any) -> Any:
        """Places of results are those of arguments; otherwise each call could compile anew."""
        loop = None if places is None else jax.tree.unflatten(structure, places)
        return jax.jit(
            self._traced_advance,
            static_argnames="stop_token_ids",
            donate_argnums=0,
            out_shardings=(None, loop, None),
        )

    def _variables(self) -> list[Any]:
        model = self._model()
        parts = (
            model.sampler.variables,
            model.trainable_variables,
            model.non_trainable_variables,
        )
        return list(itertools.chain(*parts))

    def _read(self, strategy: Strategy | None) -> list[Any]:
        with reading_as_stored(strategy):
            return [variable.value for variable in self._variables()]

    def _traced_begin(self, prompts: Any, state: Any, stop_token_ids: Any) -> _SamplerLoop:
        def keep(cond: Any, body: Any, loop_vars: Any, maximum_iterations: Any, **_: Any) -> Any:
            remaining = jnp.asarray(maximum_iterations, "int32")
            # The loop is donated; without copies, JAX would return prompts themselves.
            copies = jax.tree.map(jnp.copy, tuple(loop_vars))
            kept.append(_SamplerLoop(copies, remaining, _is_done(cond, loop_vars, remaining)))
            return loop_vars

        kept: list[_SamplerLoop] = []
        self._generate_step(keep, prompts, state, stop_token_ids)
        if len(kept) != 1:
            raise ValueError(_no_loop(self._model(), f"calls run_loop {len(kept)} times"))
        rows = kept[0].variables[0].shape[:1]
        if rows != prompts[TOKEN_IDS].shape[:1]:
            raise ValueError(_no_loop(self._model(), "keeps several sequences for a prompt"))
        return kept[0]

    def _traced_advance(
        self, loop: _SamplerLoop, prompts: Any, state: Any, count: Any, stop_token_ids: Any
    ) -> tuple[Any, _SamplerLoop, list[Any]]:
        """Traces the whole step; the compiler drops what leads to the loop, as nothing reads it."""

        def resume(
            cond: Any, body: Any, loop_vars: Any, maximum_iterations: Any, **more: Any
        ) -> Any:
            steps, *variables = run_loop(
                cond=lambda steps, *variables: cond(*variables),
                body=lambda steps, *variables: (steps + 1, *body(*variables)),
                loop_vars=(jnp.int32(0), *loop.variables),
                maximum_iterations=jnp.minimum(count, loop.remaining),
                **more,
            )
            remaining = loop.remaining - steps
            resumed.append(
                _SamplerLoop(tuple(variables), remaining, _is_done(cond, variables, remaining))
            )
            return tuple(variables)

        run_loop = self._model().sampler.run_loop
        resumed: list[_SamplerLoop] = []
        outputs, seeds = self._generate_step(resume, prompts, state, stop_token_ids)
        return (outputs[TOKEN_IDS], outputs[_PADDING_MASK]), resumed[0], seeds

    def _generate_step(
        self, run_loop: Callable[..., Any], prompts: Any, state: Any, stop_token_ids: Any
    ) -> tuple[Any, list[Any]]:
        """Traces the model's generate step with another loop; returns results and new seeds."""
        model = self._model()
        with (
            keras.StatelessScope(zip(self._variables(), state, strict=True)) as scope,
            _looping_by(model.sampler, run_loop),
        ):
            outputs = model.generate_step(prompts, stop_token_ids)
        if not isinstance(outputs, dict) or not {TOKEN_IDS, _PADDING_MASK} <= outputs.keys():
            raise ValueError(_no_loop(model, f"has a generate_step without {TOKEN_IDS!r}"))
        return outputs, [scope.get_current_value(one) for one in model.sampler.variables]


_programs: weakref.WeakKeyDictionary[Any, _Programs] = weakref.WeakKeyDictionary()


def _programs_of(model: Any) -> _Programs:
    """Returns programs of the model's generate function, which `compile` and `quantize` drop."""
    programs = _programs.get(model)
    if programs is None or programs.function_of() is not model.generate_function:
        programs = _programs[model] = _Programs(model)
    return programs


def _is_done(cond: Callable[..., Any], variables: Any, remaining: jax.Array) -> jax.Array:
    return jnp.logical_or(remaining <= 0, jnp.logical_not(cond(*variables)))


@contextlib.contextmanager
def _looping_by(sampler: Any, run_loop: Callable[..., Any]) -> Generator[None]:
    """Replaces a sampler's loop while its step is traced."""
    sampler.run_loop = run_loop
    try:
        yield
    finally:
        del sampler.run_loop


def _no_loop(model: Any, received: str) -> str:
    return explain(
        f"{type(model).__name__} with {type(model.sampler).__name__} {received}.",
        expected="a decoder and a sampler that append one token to each prompt at a time.",
        fix='compile the model with sampler="greedy", "top_k" or "top_p", or call generate.',
    )
