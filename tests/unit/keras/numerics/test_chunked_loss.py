"""Cross-entropy in chunks of the vocabulary, beside Keras's loss of whole logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg

_CLASSES = 11


def _problem(dtype: str = "float32") -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    labels = jnp.asarray(random.integers(0, _CLASSES, (3, 5)), jnp.int32)
    hidden = jnp.asarray(random.normal(size=(3, 5, 4)), dtype)
    kernel = jnp.asarray(random.normal(size=(4, _CLASSES)), "float32")
    return labels, hidden, kernel, jnp.asarray(random.normal(size=_CLASSES), "float32")


def _reference(labels: Any, hidden: Any, kernel: Any, bias: Any, soft_cap: float | None) -> Any:
    logits = hidden @ kernel + bias
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


@pytest.mark.parametrize("soft_cap", [None, pytest.param(2.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_rows", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "chunk_size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4, 11)), 100]
)
def test_losses_and_gradients_equal_those_of_whole_logits(
    chunk_size: int, has_rows: bool, soft_cap: float | None
) -> None:
    labels, *arrays = _problem()
    weights = jnp.arange(15.0).reshape(3, 5)

    def chunked(hidden: Any, kernel: Any, bias: Any) -> Any:
        return sg.nn.chunked_softmax_cross_entropy(
            labels,
            hidden,
            kernel.T if has_rows else kernel,
            bias,
            vocabulary_axis=0 if has_rows else -1,
            chunk_size=chunk_size,
            soft_cap=soft_cap,
        )

    def whole(hidden: Any, kernel: Any, bias: Any) -> Any:
        return _reference(labels, hidden, kernel, bias, soft_cap)

    np.testing.assert_allclose(chunked(*arrays), whole(*arrays), rtol=1e-5, atol=1e-6)
    for own, expected in zip(
        jax.grad(lambda *a: (chunked(*a) * weights).sum(), (0, 1, 2))(*arrays),
        jax.grad(lambda *a: (whole(*a) * weights).sum(), (0, 1, 2))(*arrays),
        strict=True,
    ):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("label", [-1, _CLASSES])
def test_a_label_outside_the_vocabulary_has_no_loss(label: int) -> None:
    labels, hidden, kernel, _ = _problem()
    labels = labels.at[0, 0].set(label)

    def total(hidden: Any) -> Any:
        return sg.nn.chunked_softmax_cross_entropy(labels, hidden, kernel, chunk_size=4)

    assert total(hidden)[0, 0] == 0
    assert not jax.grad(lambda one: total(one).sum())(hidden)[0, 0].any()


@pytest.mark.slow
def test_half_precision_sums_in_float32() -> None:
    labels, hidden, kernel, _ = _problem("bfloat16")
    losses = sg.nn.chunked_softmax_cross_entropy(labels, hidden, kernel, chunk_size=4)
    exact = hidden.astype("float32"), kernel.astype("bfloat16").astype("float32")
    expected = _reference(labels, *exact, jnp.zeros(_CLASSES), None)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    gradients = jax.grad(
        lambda *arrays: sg.nn.chunked_softmax_cross_entropy(labels, *arrays).sum(), (0, 1)
    )(hidden, kernel)
    assert [one.dtype for one in gradients] == [hidden.dtype, kernel.dtype]


def test_no_array_has_the_size_of_the_vocabulary() -> None:
    labels, hidden, kernel, _ = _problem()

    def loss(hidden: Any, kernel: Any) -> Any:
        return sg.nn.chunked_softmax_cross_entropy(labels, hidden, kernel, chunk_size=4).sum()

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, kernel))
    assert "f32[3,5,4]" in text
    assert f"[3,5,{_CLASSES}]" not in text


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": np.ones((3, 5), "float32")}, TypeError, "labels of dtype float32"),
        ({"labels": np.ones(3, "int32")}, ValueError, r"labels of shape \(3,\)"),
        ({"vocabulary_axis": 0}, ValueError, "vocabulary_axis=0 and a bias"),
        ({"vocabulary_axis": 2}, ValueError, "vocabulary_axis=2"),
        ({"bias": np.ones(3, "float32")}, ValueError, r"a bias of \(3,\)"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0"),
        ({"soft_cap": 0.0}, ValueError, "soft_cap=0.0"),
    ],
)
def test_wrong_arguments_are_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    names = ("labels", "hidden", "kernel", "bias")
    arguments: dict[str, Any] = {**dict(zip(names, _problem(), strict=True)), **change}
    with pytest.raises(error, match=message):
        sg.nn.chunked_softmax_cross_entropy(**arguments)
