"""`sg.generate_stream`: text of KerasHub's models while it is generated."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.contexts import has_strategy
from stratagem.errors import check_number, explain, invalid
from stratagem.execution.replica_context import get_replica_context
from stratagem.keras.patches import wraps_methods
from stratagem.keras.variables.creation import adopt_new
from stratagem.keras.variables.variable import reading_as_stored
from stratagem.resources import changing
from stratagem.variables.layouts import is_remote, store_of
from stratagem.variables.registry import home_of

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from stratagem.devices.mesh import Topology
    from stratagem.strategies.strategy import Strategy

# Generation of KerasHub's models from weights that stay on the devices that store them.
#
# A model's `make_generate_function` returns a function that reads all variables and passes them to
# a
# compiled program.


@wraps_methods("make_generate_function")  # KerasHub's
def generating_with_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a model's `make_generate_function`."""

    @functools.wraps(original)
    def make(self: keras.Model, *args: object, **kwargs: object) -> Any:
        generate = original(self, *args, **kwargs)
        variables = [*self.trainable_variables, *self.non_trainable_variables]
        strategy = _strategy_of(self, variables)
        if strategy is None:
            return generate
        # Otherwise its new seeds would be on other devices than before, and compile once more.
        adopt_new(getattr(getattr(self, "sampler", None), "variables", ()), strategy)
        return _Generation(generate, strategy, is_in_parts=any(map(_is_in_parts, variables)))

    return make


def place_prompts(generate: object, prompts: Any) -> tuple[Strategy | None, Any]:
    """Returns prompts on the devices that a generate function uses.

    The strategy is that whose variables are then read as they are stored; None to read them whole.
    """
    return generate.place(prompts) if isinstance(generate, _Generation) else (None, prompts)


class _Generation:
    """A generate function that computes on the devices of all replicas."""

    def __init__(self, generate: Any, strategy: Strategy, *, is_in_parts: bool) -> None:
        # A subclass may make its function from that of its base class.
        self._generate = generate._generate if isinstance(generate, _Generation) else generate
        self._strategy = strategy
        self._is_in_parts = is_in_parts

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Generates; the results are on the first replica's device."""
        strategy, (args, kwargs) = self.place((args, kwargs))
        if strategy is None:
            return self._generate(*args, **kwargs)
        with reading_as_stored(strategy):
            outputs = self._generate(*args, **kwargs)
        devices = strategy.topology.devices
        assert devices is not None
        return jax.device_put(outputs, devices[0])

    def place(self, inputs: Any) -> tuple[Strategy | None, Any]:
        """Returns inputs on the strategy's devices; None if all replicas would compute the same."""
        topology = self._strategy.topology
        leaves, structure = jax.tree.flatten(inputs)
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        is_split = topology.num_replicas > 1 and _divides_rows(arrays, topology.num_replicas)
        if not is_split and not self._is_in_parts:
            return None, inputs
        rows = topology.stacked if is_split else topology.replicated
        placed = [_placed(leaf, rows, topology) if _is_array(leaf) else leaf for leaf in leaves]
        return self._strategy, jax.tree.unflatten(structure, placed)


def _strategy_of(model: keras.Model, variables: Iterable[keras.Variable]) -> Any:
    """Returns the strategy of variables that are on the devices of all its replicas, else None.

    None also with one device, with several processes, in a replica function, and for a model that
    runs eagerly.
    """
    homes = [home_of(variable) for variable in variables]
    strategy = homes[0].strategy if homes and homes[0] is not None else None
    if strategy is None or any(home is None or home.strategy is not strategy for home in homes):
        return None
    topology = strategy.topology
    is_outside = not has_strategy() or get_replica_context() is None
    is_compiled = strategy.executor.has_values and not model.run_eagerly
    has_devices = len(topology.all_devices or ()) > 1 and not topology.spans_processes
    is_usable = is_outside and is_compiled and has_devices
    return strategy if is_usable and all(map(_is_on_replicas, variables)) else None


def _is_on_replicas(variable: keras.Variable) -> bool:
    store = store_of(variable)
    return not is_remote(variable) and (store is None or store.is_on_replicas)


def _is_in_parts(variable: keras.Variable) -> bool:
    return store_of(variable) is not None or getattr(variable, "division", None) is not None


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _divides_rows(arrays: list[Any], count: int) -> bool:
    """Returns True if all arrays have the same number of rows, which is a multiple of a count."""
    numbers = {array.shape[0] for array in arrays if array.ndim}
    return len(numbers) == 1 and numbers.pop() % count == 0


def _placed(array: Any, rows: NamedSharding, topology: Topology) -> jax.Array:
    sharding = rows if array.ndim else topology.replicated
    return jax.device_put(keras.ops.convert_to_tensor(array), sharding)


# Generation by KerasHub's samplers, a few tokens per program.
#
# A sampler's loop over tokens is one call of its `run_loop`. The first program computes what the
# loop
# begins with, the second continues it. The cache stays on the devices between them.

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


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def generate_stream(
    model: Any,
    inputs: Any,
    max_length: int | None = None,
    stop_token_ids: Any = "auto",  # noqa: S107 - of a text
    *,
    tokens_per_execution: int = 1,
) -> Iterator[Any]:
    """Generates with a KerasHub model, and yields the new text as it comes.

    The tokens are those of `model.generate`, with or without a strategy. Sharded weights stay
    sharded. Two programs are compiled, and used again by calls with the same shapes. To stop early,
    leave the loop.

    Args:
        model: a `keras_hub.models.CausalLM`, compiled with a sampler that appends one token at
            a time: greedy, random, top-k, top-p or contrastive, but not beam search.
        inputs: one batch, as for `model.generate`.
        max_length: as for `model.generate`.
        stop_token_ids: as for `model.generate`.
        tokens_per_execution: tokens per compiled call. More take less time a token, and come
            together.

    Returns:
        An iterator of strings for one prompt, or of lists of strings with an element for each
        prompt. Joined, they are the result of `model.generate(..., strip_prompt=True)`. Without a
        preprocessor, it yields dicts with the new columns of "token_ids" and "padding_mask".

    Raises:
        TypeError: the model has no `generate`, or no sampler with a loop.
        ValueError: `tokens_per_execution` is less than 1, several batches, or a sampler that keeps
            several sequences for a prompt.
        NotImplementedError: the strategy has several processes.

    Example:
        >>> try:
        ...     sg.generate_stream(keras.Sequential(), "A")
        ... except TypeError as error:
        ...     print(str(error).splitlines()[0])
        generate_stream received Sequential, which has no sampler.

    Source: keras_hub.models.CausalLM.generate; transformers.TextIteratorStreamer.
    """
    _check(model, tokens_per_execution)
    prompts, stop_tokens, text = _preprocess(model, inputs, max_length, stop_token_ids)
    tokens = generate_stepwise(model, prompts, stop_tokens, tokens_per_execution)
    if model.preprocessor is None:
        return _columns(tokens)
    texts = _texts(model.preprocessor, np.asarray(prompts["padding_mask"], bool), tokens)
    return (new[0] for new in texts) if isinstance(text, str) else texts


def _check(model: Any, tokens_per_execution: int) -> None:
    sampler = getattr(model, "sampler", None)
    if not hasattr(model, "make_generate_function") or not hasattr(sampler, "run_loop"):
        of = "has no sampler" if sampler is None else f"samples by {type(sampler).__name__}"
        raise TypeError(
            explain(
                f"generate_stream received {type(model).__name__}, which {of}.",
                expected="a keras_hub.models.CausalLM with a sampler that has run_loop.",
                fix="pass the language model, not its backbone.",
            )
        )
    check_number("generate_stream", tokens_per_execution=tokens_per_execution)
    homes = [home_of(variable) for variable in model.variables]
    if any(home is not None and home.strategy.topology.spans_processes for home in homes):
        raise NotImplementedError(
            explain(
                "generate_stream received a model of several processes.",
                expected="a model on the devices of this process.",
                fix="call model.generate on all processes, or load the weights in one process.",
            )
        )


def _preprocess(
    model: Any, inputs: Any, max_length: int | None, stop_token_ids: Any
) -> tuple[Any, tuple[int, ...] | None, Any]:
    """Returns prompts as tokens, the stop tokens, and the prompts as `generate` returns them.

    Models prepare inputs inside `generate`. So it runs with a function that returns the prompts.
    """
    received: list[tuple[Any, Any]] = []

    def record(prompts: Any, stop_token_ids: Any = None) -> Any:
        received.append((prompts, stop_token_ids))
        return prompts

    with changing(model, generate_function=record):
        text = model.generate(inputs, max_length=max_length, stop_token_ids=stop_token_ids)
    if len(received) != 1:
        raise invalid(
            f"generate_stream received {len(received)} batches.",
            expected="one batch of prompts.",
            fix="call it for each batch.",
        )
    prompts, stop_tokens = received[0]
    return prompts, None if stop_tokens is None else tuple(stop_tokens), text


def _columns(tokens: Iterator[Tokens]) -> Generator[dict[str, np.ndarray]]:
    for token_ids, mask, start, end in tokens:
        yield {TOKEN_IDS: token_ids[:, start:end], "padding_mask": mask[:, start:end]}


def _texts(
    preprocessor: Any, is_prompt: np.ndarray, tokens: Iterator[Tokens]
) -> Generator[list[str]]:
    """Yields what each prompt's text grew by; a character of several tokens comes whole."""
    sent = [""] * len(is_prompt)
    whole = sent
    for token_ids, mask, _, end in tokens:
        is_new = mask.astype(bool) & ~is_prompt & (np.arange(mask.shape[1]) < end)
        whole = _decoded(preprocessor, token_ids, is_new)
        grown = [text.rstrip(_INCOMPLETE) for text in whole]
        grown = [
            text if text.startswith(old) else old for text, old in zip(grown, sent, strict=True)
        ]
        if grown != sent:
            yield [text[len(old) :] for text, old in zip(grown, sent, strict=True)]
            sent = grown
    if whole != sent:
        yield [text[len(old) :] for text, old in zip(whole, sent, strict=True)]


def _decoded(preprocessor: Any, token_ids: np.ndarray, is_new: np.ndarray) -> list[str]:
    """Decodes new tokens alone, moved to the front."""
    order = np.argsort(~is_new, axis=1, kind="stable")
    moved = np.take_along_axis(token_ids, order, axis=1)
    mask = np.take_along_axis(is_new, order, axis=1)
    return list(preprocessor.generate_postprocess({TOKEN_IDS: moved, "padding_mask": mask}))
