"""Published figures beside estimates: the rows, a small one, the table and the picture."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.large_models.cases import Decoder
from benchmarks.large_models.published import (
    compare,
    draw,
    make_table,
    picked_loss,
    read_rows,
)

_SMALL = Decoder(64, 4, 2, 128, 5, 96)


def test_rows_have_the_weights_that_their_names_say() -> None:
    billions = {row.model: row.sizes.num_parameters / 1e9 for row in read_rows()}
    for model, count in billions.items():
        said = float(model.split()[-1].removesuffix("B"))
        assert count == pytest.approx(said, rel=0.04), model
    assert sum(row.calibrates for row in read_rows()) == 3


def test_a_throughput_in_flops_is_one_in_tokens() -> None:
    """MaxText prints both for Llama 3.1 8B: 417.4 TFLOP/s and 7,207 tokens/s."""
    row = next(row for row in read_rows() if row.target.name == "v6e:16x16")
    weights = row.sizes.num_parameters - row.sizes.vocabulary * row.sizes.width
    per_token = 6 * (weights + 2 * row.sizes.num_layers * row.sizes.width * row.length)
    assert per_token * row.tokens == pytest.approx(417.4e12, rel=0.001)


@pytest.mark.slow
def test_table_and_picture(tmp_path) -> None:
    rows = [
        dataclasses.replace(row, sizes=_SMALL, length=32, batch=2)
        for row in read_rows()
        if row.target.name in ("8xH100", "v6e:2x4", "64xA100")
    ]
    with jax.numpy_dtype_promotion("standard"):  # jax.nn scales by a NumPy scalar
        found = [compare(row) for row in rows[-3:]]
    assert all(0 < one["step_s"] < 1 and one["fits"] for one in found)
    table = make_table(found)
    assert len(table.splitlines()) == 2 + len(found)
    assert rows[-1].model in table
    draw(tmp_path / "published.png", found)
    assert (tmp_path / "published.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_loss_of_pytorch_is_the_cross_entropy_and_has_three_arrays_of_logits() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype("float32")
    labels = np.array([[0, 4, 2], [1, 1, 3]])

    def reference(logits: jax.Array) -> jax.Array:
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
        return -jnp.mean(picked)

    expected = jax.value_and_grad(reference)(logits)
    found = jax.value_and_grad(functools.partial(picked_loss, labels=labels))(logits)
    assert found[0] == pytest.approx(expected[0])
    np.testing.assert_allclose(found[1], expected[1], atol=1e-6)

    row = next(row for row in read_rows() if row.picks_rows)
    row = dataclasses.replace(row, sizes=Decoder(64, 4, 2, 128, 5, 8192), length=256, batch=4)
    fused = dataclasses.replace(row, picks_rows=False)
    with jax.numpy_dtype_promotion("standard"):
        more = compare(row)["memory_gib"] - compare(fused)["memory_gib"]
    array_gib = 4 * 4 * 256 * 8192 / 2**30
    assert 1.9 * array_gib < more < 3 * array_gib
