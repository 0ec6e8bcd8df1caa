"""`keras.RematScope` with layers that take static arguments and write state, and its steps."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
import stratagem.keras
from tests.marks import slow
from tests.unit.keras.numerics.decoder_blocks import Block, decoder, equations, fitted

_SCOPES: dict[str, Any] = {
    "plain": contextlib.nullcontext,
    "one": lambda: sg.OneDeviceStrategy("cpu:0").scope(),
    "two": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope(),
    "sharded": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all").scope(),
}

_MODES: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "activations": {"mode": "activations"},
    "larger_than": {"mode": "larger_than", "output_size_threshold": 8},
    "list_of_layers": {"mode": "list_of_layers", "layer_names": ["block_1"]},
}


_POLICIES = ["full", "dots", "offload", "offload_dots", jax.checkpoint_policies.everything_saveable]


def _recomputed_scan(model: Any) -> None:
    sg.scan_layers(model)
    sg.remat(model)


@pytest.mark.parametrize(
    ("scope", "mode", "prepare"),
    [
        ("sharded", None, _recomputed_scan),
        slow("plain", "list_of_layers", lambda model: None),
        slow("one", "larger_than", lambda model: None),
        slow("two", "activations", lambda model: None),
        slow("sharded", "full", lambda model: None),
        slow("plain", None, sg.scan_layers),
        *(slow("sharded", None, functools.partial(sg.remat, policy=one)) for one in _POLICIES),
    ],
)
def test_fit_equals_fit_without(scope, mode, prepare) -> None:
    """With dropout, statistics, losses that layers add, and counters."""
    recomputing = contextlib.nullcontext() if mode is None else keras.RematScope(**_MODES[mode])
    with recomputing:
        losses, weights = fitted(_SCOPES[scope](), prepare)
    expected_losses, expected = fitted(_SCOPES[scope]())
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for own, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def _num_recomputed(model: Any) -> int:
    """Returns the number of calls that a gradient computes again."""
    trainable = [one.value for one in model.trainable_variables]
    others = [one.value for one in model.non_trainable_variables]

    def loss(values: Any) -> Any:
        outputs, _ = model.stateless_call(values, others, jnp.ones((2, 4)), training=True)
        return outputs.sum()

    return len(equations(jax.make_jaxpr(jax.grad(loss))(trainable).jaxpr, "remat2"))


def test_an_embedding_keeps_gradients_of_rows() -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    with strategy.scope(), keras.RematScope(mode="full"):
        embedding = keras.layers.Embedding(30_000, 4)
        dense = keras.layers.Dense(1)
        dense.build((None, 4))
        embedding.build(None)

    def step(ids: Any) -> Any:
        loss = lambda: jnp.sum(dense(embedding(ids)))  # noqa: E731
        _, (rows,) = sg.value_and_grad(loss, embedding.trainable_variables, sparse_gradients=True)
        assert isinstance(rows, sg.IndexedSlices)
        return rows.values

    assert strategy.run(step, args=(np.array([3, 4], "int32"),)).shape == (2, 4)


@pytest.mark.slow
def test_custom_loop_keeps_writes_and_losses_of_recomputed_layers() -> None:
    results = []
    for is_recomputed in (False, True):
        keras.utils.set_random_seed(0)
        strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        with strategy.scope():
            block: Any = Block(0)
            block.build((None, 4))
            block.norm.synchronized = True
        if is_recomputed:
            sg.remat(block, layers=[block])

        def step(x: Any, block: Any = block) -> Any:
            def loss() -> Any:
                value = jnp.mean(block(x, training=True) ** 2)
                assert len(block.losses) == 1
                return value + sg.scale_regularization_loss(block.losses)

            return sg.value_and_grad(loss, block.trainable_variables)

        x = np.random.default_rng(0).normal(size=(4, 4)).astype("float32")
        parts = strategy.experimental_distribute_values_from_function(
            lambda context, x=x: x[2 * context.replica_id_in_sync_group :][:2]
        )
        value, gradients = strategy.run(step, args=(parts,))
        assert float(block.calls.value) == 1
        totals = [strategy.reduce("SUM", one, axis=None) for one in (value, *gradients)]
        results.append([*totals, block.norm.moving_mean.value, block.seed_state])
    for own, expected in zip(*results, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5)


# Keras 3.16 says that a recurrent layer passes no mask on. No layer follows here.
@pytest.mark.compatibility
@pytest.mark.filterwarnings("ignore:Layer 'lstm' .*was passed an input with a mask:UserWarning")
def test_masks_pass_through_recomputed_layers() -> None:
    model = keras.Sequential([keras.layers.Masking(), keras.layers.Dense(3), keras.layers.LSTM(2)])
    model.build((None, 5, 4))
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype("float32")
    x[0, 3:] = 0.0

    def call() -> Any:
        trainable = [one.value for one in model.trainable_variables]
        others = [one.value for one in model.non_trainable_variables]
        return jax.jit(lambda *state: model.stateless_call(*state, x)[0])(trainable, others)

    expected = call()
    sg.remat(model, layers="masking|dense|lstm")
    np.testing.assert_allclose(call(), expected, rtol=1e-6)


def test_function_with_static_arguments() -> None:
    def scaled(x: Any, kind: str, *, is_doubled: bool) -> Any:
        return {"y": jnp.sin(x) * (2.0 if is_doubled else 1.0), "kind": kind, "none": None}

    def loss(x: Any) -> Any:
        results = keras.remat(scaled)(x, "sine", is_doubled=True)
        assert results["kind"] == "sine"
        assert results["none"] is None
        return results["y"]

    jaxpr = jax.make_jaxpr(jax.grad(loss))(1.0)
    assert len(equations(jaxpr.jaxpr, "remat2")) == 1
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(1.0), 2 * np.cos(1.0), rtol=1e-6)


def test_summaries_of_recomputed_layers_are_written_once(tmp_path: Any) -> None:
    class Summarized(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            sg.summary.scalar("mean", jnp.mean(x), step=3)
            return x * 2

    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope(), keras.RematScope(mode="full"):
        layer = Summarized()

    def step(x: Any) -> Any:
        return sg.value_and_grad(lambda y: layer(y).sum(), x)

    writer = sg.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        strategy.run(step, args=(jnp.ones(2),))
    writer.close()
    assert len(list(tmp_path.iterdir())) == 1
    (path,) = tmp_path.iterdir()
    assert path.read_bytes().count(b"mean") == 1


# `sg.remat`: blocks that are found in finished models, and the policies.


def _tower() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Dense(4)(inputs)))


def test_repeated_blocks_are_found_inside_models_and_layers() -> None:
    model = decoder()
    blocks = [one for one in model.layers if isinstance(one, Block)]
    assert sg.remat(model) == blocks
    assert _num_recomputed(model) == 2
    sg.remat(model, layers="inner_0")  # an inner layer is recomputed if it asks
    assert _num_recomputed(model) > 2
    other = decoder()
    sg.remat(other)
    sg.remat(other, None)
    assert _num_recomputed(other) == 0
    assert [one.name for one in sg.remat(other, layers="block_1$")] == ["block_1"]
    assert _num_recomputed(other) == 1
    assert sg.remat(other, layers=other.layers[-1:]) == other.layers[-1:]
    assert sg.remat(keras.Sequential([model, keras.layers.Dense(1)])) == blocks
    towers = [_tower(), _tower()]
    assert sg.remat(keras.Sequential([keras.Input((4,)), *towers])) == towers


def test_wrong_arguments_of_remat_are_refused() -> None:
    model = decoder()
    with pytest.raises(ValueError, match="policy='minimal'"):
        sg.remat(model, "minimal")
    with pytest.raises(TypeError, match="remat received 3"):
        sg.remat(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="remat received 'block_0'"):
        sg.remat(model, layers=["block_0"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a layer that is not in the model, and found nothing"):
        sg.remat(model, layers=[keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="layers='decoder', and found nothing"):
        sg.remat(model, layers="decoder")
    with pytest.raises(ValueError, match="no layers, and found nothing"):
        sg.remat(_tower())


# The loss that computes the head of a language model, in `fit` and in custom loops.

_CLASSES = 11
_RANDOM = np.random.default_rng(0)
_TOKENS = _RANDOM.integers(0, _CLASSES, (7, 6)).astype("int32")
_LABELS = _RANDOM.integers(0, _CLASSES, (7, 6)).astype("int32")
_WEIGHTS = _RANDOM.integers(0, 2, (7, 6)).astype("float32")

_Loss = sg.nn.ChunkedSparseCategoricalCrossentropy


class _LanguageModel(keras.Model):
    """Returns hidden states, or with `whole` logits; its head is one of its layers."""

    def __init__(self, *, is_tied: bool, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.is_tied = is_tied
        arguments: dict[str, Any] = {"tie_weights": is_tied, "logit_soft_cap": 3.0}
        self.embedding = keras.layers.ReversibleEmbedding(_CLASSES, 4, **arguments)
        self.inner = keras.layers.Dense(4)
        self.head = self.embedding if is_tied else keras.layers.Dense(_CLASSES)
        self.head.build((None, 4) if not is_tied else None)

    def call(self, tokens: Any) -> Any:
        hidden = self.inner(self.embedding(tokens))
        if not self.whole:
            return hidden
        return self.embedding(hidden, reverse=True) if self.is_tied else self.head(hidden)


def _fitted(scope: Any, *, is_tied: bool, whole: bool, ignore_class: int | None) -> Any:
    keras.utils.set_random_seed(0)
    with scope:
        model: Any = _LanguageModel(is_tied=is_tied, whole=whole)
        loss: Any = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=ignore_class
        )
        if not whole:
            loss = _Loss(model.head, chunk_size=4, ignore_class=ignore_class)
        model.compile(keras.optimizers.SGD(0.5), loss)
    history = model.fit(
        _TOKENS, _LABELS, sample_weight=_WEIGHTS, batch_size=4, shuffle=False, verbose=0
    )
    return history.history["loss"], [np.asarray(one.value) for one in model.weights]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_tied", "ignore_class"),
    [("plain", True, None), ("one", False, 3), ("two", True, 3), ("sharded", False, None)],
)
def test_fit_equals_that_of_whole_logits(name, is_tied, ignore_class) -> None:
    if not hasattr(keras.layers, "ReversibleEmbedding"):
        pytest.skip("this Keras has no ReversibleEmbedding")
    arguments: dict[str, Any] = {"is_tied": is_tied, "ignore_class": ignore_class}
    losses, weights = _fitted(_SCOPES[name](), whole=False, **arguments)
    expected_losses, expected = _fitted(contextlib.nullcontext(), whole=True, **arguments)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for own, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


def test_custom_loop_gets_losses_of_positions() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        head = keras.layers.Dense(_CLASSES)
        head.build((None, 4))
    hidden = _RANDOM.normal(size=(6, 4)).astype("float32")
    loss = _Loss(head, chunk_size=5, reduction=None)

    def step() -> Any:
        total = lambda: sg.compute_average_loss(loss(_LABELS[0], hidden), global_batch_size=12)  # noqa: E731
        return sg.value_and_grad(total, [head.kernel])

    value, (gradient,) = strategy.run(step)
    whole = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    expected, (of_kernel,) = sg.value_and_grad(
        lambda: whole(_LABELS[0], head(hidden)), [head.kernel]
    )
    np.testing.assert_allclose(strategy.reduce("SUM", value, axis=None), expected, rtol=1e-5)
    total = strategy.reduce("SUM", gradient, axis=None)
    np.testing.assert_allclose(total, of_kernel, rtol=1e-4, atol=1e-6)


def test_other_heads_and_a_loaded_loss_without_one_are_refused() -> None:
    config = keras.saving.serialize_keras_object(_Loss(keras.layers.Dense(2), ignore_class=-1))
    loaded: Any = keras.saving.deserialize_keras_object(config)
    assert loaded.ignore_class == -1
    with pytest.raises(ValueError, match="was loaded from a file and has no head"):
        loaded(_LABELS, np.ones((7, 6, 4), "float32"))
    with pytest.raises(TypeError, match="received head=<Embedding"):
        _Loss(keras.layers.Embedding(3, 4))
    head = keras.layers.Dense(_CLASSES, activation="softmax")
    head.build((None, 4))
    with pytest.raises(ValueError, match="is quantized or has an activation"):
        _Loss(head)(_LABELS, np.ones((7, 6, 4), "float32"))


# Cross-entropy in chunks of the vocabulary, beside Keras's loss of whole logits.


def _problem(dtype: str = "float32") -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    labels = jnp.asarray(random.integers(0, _CLASSES, (3, 5)), jnp.int32)
    hidden = jnp.asarray(random.normal(size=(3, 5, 4)), dtype)
    kernel = jnp.asarray(random.normal(size=(4, _CLASSES)), "float32")
    return labels, hidden, kernel, jnp.asarray(random.normal(size=_CLASSES), "float32")


def _reference_of_chunked_loss(labels, hidden, kernel, bias, soft_cap):
    logits = hidden @ kernel + bias
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


@pytest.mark.parametrize(
    ("chunk_size", "has_rows", "soft_cap"),
    [
        (100, True, None),
        slow(1, False, 2.0),
        slow(4, False, None),
        slow(4, True, 2.0),
        slow(11, False, 2.0),
    ],
)
def test_losses_and_gradients_equal_those_of_whole_logits(chunk_size, has_rows, soft_cap) -> None:
    labels, *arrays = _problem()
    weights = jnp.arange(15.0).reshape(3, 5)

    def chunked(hidden: Any, kernel: Any, bias: Any) -> Any:
        given: Any = {"vocabulary_axis": 0 if has_rows else -1, "chunk_size": chunk_size}
        table = kernel.T if has_rows else kernel
        return sg.nn.chunked_softmax_cross_entropy(
            labels, hidden, table, bias, soft_cap=soft_cap, **given
        )

    def whole(hidden: Any, kernel: Any, bias: Any) -> Any:
        return _reference_of_chunked_loss(labels, hidden, kernel, bias, soft_cap)

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
    expected = _reference_of_chunked_loss(labels, *exact, jnp.zeros(_CLASSES), None)
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
def test_wrong_arguments_are_refused(change, error, message) -> None:
    names = ("labels", "hidden", "kernel", "bias")
    arguments: dict[str, Any] = {**dict(zip(names, _problem(), strict=True)), **change}
    with pytest.raises(error, match=message):
        sg.nn.chunked_softmax_cross_entropy(**arguments)
