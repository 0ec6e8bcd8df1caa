"""`sg.generate_stream`: text of KerasHub's models while it is generated."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from stratagem.keras.training.stepwise_generation import TOKEN_IDS, Tokens, generate_stepwise
from stratagem.messages import explain
from stratagem.variables.registry import home_of

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
    if tokens_per_execution < 1:
        raise ValueError(
            explain(
                f"generate_stream received tokens_per_execution={tokens_per_execution}.",
                expected="a positive number.",
                fix="leave it out to get each token as soon as it is computed.",
            )
        )
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

    generate = model.generate_function
    model.generate_function = record
    try:
        text = model.generate(inputs, max_length=max_length, stop_token_ids=stop_token_ids)
    finally:
        model.generate_function = generate
    if len(received) != 1:
        raise ValueError(
            explain(
                f"generate_stream received {len(received)} batches.",
                expected="one batch of prompts.",
                fix="call it for each batch.",
            )
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
