"""A decoder with the protocol of KerasHub's: a cache, a sampler with `run_loop`, a preprocessor."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from keras import ops

import stratagem as sg

__all__ = ["DEVICES", "STRATEGIES", "Decoder", "Letters", "Sampler", "made"]

DEVICES = [f"cpu:{index}" for index in range(4)]
_LAYOUTS = {".*hidden/kernel": (None, "logical"), ".*output/kernel": ("logical", None)}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "mirrored": lambda: sg.MirroredStrategy(DEVICES),
    "sharded": lambda: sg.MirroredStrategy(DEVICES, shard_state="all"),
    "layouts": lambda: sg.MirroredStrategy(DEVICES, devices_per_replica=2, layout_map=_LAYOUTS),
    "both": lambda: sg.MirroredStrategy(
        DEVICES, devices_per_replica=2, layout_map=_LAYOUTS, shard_state="all"
    ),
    "pinned": lambda: sg.CentralStorageStrategy(DEVICES, parameter_device="pinned_host"),
}

_VOCABULARY_SIZE, _WIDTH = 32, 64


class Sampler:
    """Takes the most likely token, or with a seed a random one."""

    def __init__(self, seed: int | None = None, num_beams: int = 1) -> None:
        self.seeds = keras.random.SeedGenerator(seed)
        self.num_beams, self.is_greedy = num_beams, seed is None

    @property
    def variables(self) -> list[Any]:
        return [self.seeds.state]

    def __call__(
        self, next: Any, prompt: Any, cache: Any, index: Any, mask: Any, stops: Any, model: Any
    ) -> Any:
        def cond(prompt: Any, cache: Any, index: Any) -> Any:
            if stops is None:
                return True
            is_end = ops.logical_and(ops.isin(prompt, list(stops)), ops.logical_not(mask))
            return ops.logical_not(ops.all(ops.any(is_end, axis=-1)))

        def body(prompt: Any, cache: Any, index: Any) -> Any:
            logits, cache = next(prompt, cache, index)
            if not self.is_greedy:
                logits = logits + 3 * keras.random.normal(logits.shape, seed=self.seeds)
            token = ops.cast(ops.argmax(logits, axis=-1), prompt.dtype)
            token = ops.where(mask[:, index], prompt[:, index], token)
            prompt = ops.slice_update(prompt, [0, index], ops.expand_dims(token, 1))
            return prompt, cache, index + 1

        beams = (ops.repeat(one, self.num_beams, axis=0) for one in (prompt, cache, mask))
        prompt, cache, mask = beams
        return self.run_loop(
            cond,
            body,
            loop_vars=(prompt, cache, index),
            maximum_iterations=prompt.shape[1] - index,
            model=model,
        )[0][:: self.num_beams]

    def run_loop(
        self, cond: Any, body: Any, model: Any, loop_vars: Any, maximum_iterations: Any
    ) -> Any:
        """As in KerasHub: the scope of the loop needs the values of all variables."""
        weights = [*model.trainable_variables, *model.non_trainable_variables]
        values = [ops.convert_to_tensor(variable) for variable in weights]

        def stateless_body(seed: Any, *loop_vars: Any) -> Any:
            pairs = zip([self.seeds.state, *weights], [seed, *values], strict=True)
            with keras.StatelessScope(pairs) as scope:
                loop_vars = body(*loop_vars)
            return scope.get_current_value(self.seeds.state), *loop_vars

        looped: Any = ops.while_loop(
            lambda seed, *loop_vars: cond(*loop_vars),
            stateless_body,
            (ops.convert_to_tensor(self.seeds.state), *loop_vars),
            maximum_iterations=maximum_iterations,
        )
        seed, *loop_vars = looped
        self.seeds.state.assign(seed)
        return loop_vars


class Letters:
    """Token 1 ends a text, 2 and 3 are halves of "é", others are letters."""

    def generate_preprocess(self, texts: Any, sequence_length: int | None) -> Any:
        rows = [[ord(letter) - ord("a") + 4 for letter in text] for text in texts]
        length = sequence_length or 12
        lengths = np.array([len(row) for row in rows])
        ids = np.array([row + [0] * (length - len(row)) for row in rows], "int32")
        return {"token_ids": ids, "padding_mask": np.arange(length) < lengths[:, None]}

    def generate_postprocess(self, tokens: Any) -> list[str]:
        rows = zip(np.asarray(tokens["token_ids"]), np.asarray(tokens["padding_mask"]), strict=True)
        return [b"".join(map(_letter, ids[mask])).decode(errors="replace") for ids, mask in rows]


def _letter(token: int) -> bytes:
    special = {0: b"", 1: b"", 2: "é".encode()[:1], 3: "é".encode()[1:]}
    return special.get(int(token)) or (b"" if token < 2 else bytes([ord("a") + int(token) - 4]))


class Decoder(keras.Model):
    """Generates from the sum of all embeddings so far."""

    def __init__(self, preprocessor: Any = None) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(_VOCABULARY_SIZE, _WIDTH, name="tokens")
        self.hidden = keras.layers.Dense(_WIDTH, "tanh", name="hidden")
        self.scale = keras.Variable(
            1.0, trainable=False, synchronization="on_read", aggregation="mean", name="scale"
        )
        self.output_layer = keras.layers.Dense(_VOCABULARY_SIZE, name="output")
        self.sampler, self.preprocessor = Sampler(), preprocessor
        self.generate_function: Any = None
        self.traced: list[Any] = []
        self.received: list[Any] = []
        self(np.zeros((1, 1), "int32"))

    def call(self, tokens: Any) -> Any:
        return self._logits(self.embedding(tokens))

    def _logits(self, embedded: Any) -> Any:
        return self.output_layer(self.hidden(embedded) * self.scale)

    def generate_step(self, inputs: Any, stop_token_ids: Any = None) -> Any:
        tokens, mask = inputs["token_ids"], ops.cast(inputs["padding_mask"], "bool")
        self.traced.append(tokens.shape)
        index: Any = ops.min(ops.sum(ops.cast(mask, "int32"), axis=-1))
        is_before = ops.expand_dims(ops.arange(tokens.shape[1]) < index - 1, -1)
        cache = ops.sum(ops.where(is_before, self.embedding(tokens), 0.0), axis=1)

        def next(prompt: Any, cache: Any, index: Any) -> Any:
            cache = cache + self.embedding(prompt[:, index - 1])
            return self._logits(cache), cache

        tokens = self.sampler(next, tokens, cache, index, mask, stop_token_ids, self)
        padding_mask = ops.ones_like(tokens, "bool")
        if stop_token_ids is not None:
            is_end = ops.logical_and(ops.isin(tokens, list(stop_token_ids)), ops.logical_not(mask))
            is_end = ops.cast(is_end, "int32")
            padding_mask = ops.cumsum(is_end, axis=-1) == is_end
        return {"token_ids": tokens, "padding_mask": padding_mask}

    def make_generate_function(self) -> Any:
        if self.generate_function is None:
            self.generate_function = self.generate_step if self.run_eagerly else self._compiled()
        return self.generate_function

    def _compiled(self) -> Any:
        def compiled(inputs: Any, stop_token_ids: Any, state: Any) -> Any:
            pairs = zip(self._variables(), state, strict=True)
            with keras.StatelessScope(pairs) as scope:
                outputs = self.generate_step(inputs, stop_token_ids)
            return outputs, scope.get_current_value(self.sampler.seeds.state)

        program = jax.jit(compiled, static_argnames=["stop_token_ids"])

        def generate(inputs: Any, stop_token_ids: Any = None) -> Any:
            state = [variable.value for variable in self._variables()]
            self.received = state[1:]
            inputs = keras.tree.map_structure(ops.convert_to_tensor, inputs)
            outputs, seed = program(inputs, stop_token_ids, state)
            self.sampler.seeds.state.assign(seed)
            return outputs

        return generate

    def _variables(self) -> list[Any]:
        model = (self.trainable_variables, self.non_trainable_variables)
        return list(itertools.chain(self.sampler.variables, *model))

    def generate(
        self,
        inputs: Any,
        max_length: int | None = None,
        stop_token_ids: Any = "auto",
        strip_prompt: bool = False,
    ) -> Any:
        """As in KerasHub: text in, text out, or tokens without a preprocessor."""
        generate = self.make_generate_function()
        if stop_token_ids == "auto":
            stop_token_ids = (1,)
        if self.preprocessor is None:
            return keras.tree.map_structure(np.asarray, generate(inputs, stop_token_ids))
        prompts = [inputs] if isinstance(inputs, str) else inputs
        prompts = self.preprocessor.generate_preprocess(prompts, max_length)
        outputs = dict(generate(prompts, stop_token_ids=stop_token_ids))
        if strip_prompt:
            outputs["padding_mask"] = outputs["padding_mask"] & ~prompts["padding_mask"]
        texts = self.preprocessor.generate_postprocess(outputs)
        return texts[0] if isinstance(inputs, str) else texts


def made(
    strategy: Any = None, preprocessor: Any = None, *, kind: Any = Decoder, seed: int | None = None
) -> Any:
    """A decoder with known weights in the scope of a strategy; with a seed it draws tokens."""
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = kind(preprocessor)
        model.sampler = Sampler(seed)
    random = np.random.default_rng(5)
    model.set_weights([random.normal(0, 0.5, one.shape).astype(one.dtype) for one in model.weights])
    return model
