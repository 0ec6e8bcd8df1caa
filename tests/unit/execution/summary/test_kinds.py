"""Summaries written on the host match what TensorBoard's reader finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from tests.unit.execution.summary.events import Read


@pytest.fixture
def writer(tmp_path: Path):
    with sg.summary.create_file_writer(tmp_path).as_default() as one:
        yield one
        one.close()


def read(writer, folder: Path) -> Read:
    writer.close()
    return Read(folder)


@pytest.mark.parametrize(
    "number", [True, np.float64(1e-3), np.array(3, np.int32), jnp.asarray(1.5, jnp.bfloat16)]
)
def test_scalar_is_a_float_of_32_bits(number, writer, tmp_path) -> None:
    assert sg.summary.scalar("loss", number, step=2, description="of *training*") is True
    found = read(writer, tmp_path)
    assert found.numbers("loss") == [(2, float(np.float32(number)))]
    assert found.description("loss") == "of *training*"
    assert found.tensors("loss")[0][1].dtype == np.float32


def test_text_is_bytes_in_the_shape_of_its_lists(writer, tmp_path) -> None:
    assert sg.summary.text("remark", "größer", step=1) is True
    sg.summary.text("table", [["a", "b"], ["c", "d"]], step=2)
    found = read(writer, tmp_path)
    ((_, remark),) = found.tensors("remark")
    ((_, table),) = found.tensors("table")
    assert found.plugin("remark") == "text"
    assert remark.item().decode() == "größer"
    assert table.tolist() == [[b"a", b"b"], [b"c", b"d"]]


def test_write_takes_arrays_strings_and_metadata(writer, tmp_path) -> None:
    from tensorboard.plugins.scalar.metadata import create_summary_metadata

    metadata = create_summary_metadata(None, None)
    sg.summary.write("plain", np.arange(4, dtype=np.int32).reshape(2, 2), step=1)
    sg.summary.write("words", "layers", step=1)
    sg.summary.write("loss", np.float32(2), step=1, metadata=metadata)
    sg.summary.write("bytes", np.float32(3), step=1, metadata=metadata.SerializeToString())
    found = read(writer, tmp_path)
    assert found.tensors("plain")[0][1].tolist() == [[0, 1], [2, 3]]
    assert found.tensors("words")[0][1].item() == b"layers"
    assert found.numbers("loss") == [(1, 2.0)]
    assert found.numbers("bytes") == [(1, 3.0)]


def test_without_a_writer_nothing_is_written_and_no_step_is_asked_for() -> None:
    assert sg.summary.scalar("loss", 1.0) is False
    assert sg.summary.histogram("h", [1.0]) is False
    assert sg.summary.image("i", np.zeros((1, 2, 2, 1))) is False
    assert sg.summary.text("t", "words") is False
    assert sg.summary.write("w", np.zeros(3)) is False


def test_wrong_data_is_refused(writer) -> None:
    with pytest.raises(ValueError, match="has no step"):
        sg.summary.scalar("loss", 1.0)
    with pytest.raises(ValueError, match=r"received data of shape \(2,\)"):
        sg.summary.scalar("loss", [1.0, 2.0], step=1)
    for wrong in ("words", 1j, None):
        with pytest.raises(TypeError, match=r"received data of type \w+ and dtype"):
            sg.summary.scalar("loss", wrong, step=1)
    with pytest.raises(ValueError, match="received buckets=0"):
        sg.summary.histogram("h", [1.0], step=1, buckets=0)
    for shape in ((2, 2), (1, 2, 2, 5)):
        with pytest.raises(ValueError, match="received images of shape"):
            sg.summary.image("i", np.zeros(shape), step=1)
    with pytest.raises(ValueError, match="received max_outputs=-1"):
        sg.summary.image("i", np.zeros((1, 2, 2, 1)), step=1, max_outputs=-1)
    with pytest.raises(TypeError, match="received text of type int"):
        sg.summary.text("t", 3, step=1)


# Summaries in loops and branches, and in functions under jax.jit, are written.


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_bodies_of_loops_and_branches_write_once(devices: Any, tmp_path: Path) -> None:
    strategy = sg.MirroredStrategy(devices)

    def step(rows: Any) -> Any:
        def body(total: Any, row: Any) -> tuple[Any, None]:
            sg.summary.scalar("row", row, step=row.astype(jnp.int32))
            return total + row, None

        total, _ = jax.lax.scan(body, jnp.zeros(()), rows)
        jax.lax.cond(
            total > 10,
            lambda: jnp.asarray(sg.summary.histogram("large", rows)),
            lambda: jnp.asarray(False),
        )
        return jax.grad(lambda x: (sg.summary.scalar("square", x * x), x * x)[1])(total)

    writer = sg.summary.create_file_writer(tmp_path)
    with writer.as_default(step=4):
        (batch,) = strategy.distribute_dataset([jnp.arange(8.0)])
        strategy.run(step, args=(batch,))
    with sg.summary.record_if(condition=False), writer.as_default(step=5):
        strategy.run(step, args=(batch,))
    writer.close()
    found = Read(tmp_path)
    num_rows = 8 // len(devices)
    total = num_rows * (num_rows - 1) / 2
    assert sorted(found.numbers("row")) == [(row, float(row)) for row in range(num_rows)]
    assert found.numbers("square") == [(4, total * total)]
    assert ("large" in found.tags) is (total > 10)
    if total > 10:
        assert found.tensors("large")[0][1][:, 2].sum() == num_rows


def test_function_under_jit_sees_the_settings_when_it_runs(tmp_path: Path) -> None:
    first, second = (sg.summary.create_file_writer(tmp_path / name) for name in "ab")

    @jax.jit
    def step(value: Any, is_recorded: Any) -> Any:
        sg.summary.scalar("value", value)
        with sg.summary.record_if(is_recorded):
            sg.summary.scalar("sometimes", value)
        return value

    step(1.0, True)
    for number in range(4):
        with (first if number < 2 else second).as_default(step=number):
            step(float(number), number % 2 == 0)
    first.close(), second.close()
    assert Read(tmp_path / "a").numbers("value") == [(0, 0.0), (1, 1.0)]
    assert Read(tmp_path / "b").numbers("value") == [(2, 2.0), (3, 3.0)]
    assert Read(tmp_path / "a").numbers("sometimes") == [(0, 0.0)]
    assert Read(tmp_path / "b").numbers("sometimes") == [(2, 2.0)]


def test_host_function_that_is_differentiated_writes_at_once(tmp_path: Path) -> None:
    variable = sg.Variable(3.0)
    writer = sg.summary.create_file_writer(tmp_path)

    def loss() -> Any:
        sg.summary.scalar("loss", variable * variable)
        return variable * variable

    with writer.as_default(step=1):
        sg.value_and_grad(loss, [variable])
        jax.grad(lambda x: (sg.summary.scalar("plain", x), x)[1])(2.0)
    writer.close()
    assert Read(tmp_path).numbers("loss") == [(1, 9.0)]
    assert Read(tmp_path).numbers("plain") == [(1, 2.0)]


# Buckets of histograms against NumPy, and pixels of images.


@pytest.mark.parametrize(("buckets", "dtype"), [(None, np.float32), (1, np.float64), (7, np.int32)])
def test_histogram_is_that_of_numpy(buckets, dtype, writer, tmp_path) -> None:
    data = (np.random.default_rng(0).normal(size=(20, 30)) * 100).astype(dtype)
    assert sg.summary.histogram("weights", data, step=1, buckets=buckets) is True
    found = read(writer, tmp_path)
    assert found.plugin("weights") == "histograms"
    ((step, table),) = found.tensors("weights")
    counts, edges = np.histogram(data.astype(np.float64), bins=buckets or 30)
    assert step == 1
    assert table.dtype == np.float64
    np.testing.assert_allclose(table[:, 0], edges[:-1], rtol=1e-12)
    np.testing.assert_allclose(table[:, 1], edges[1:], rtol=1e-12)
    np.testing.assert_array_equal(table[:, 2], counts)


@pytest.mark.parametrize(
    ("data", "edges", "counts"),
    [
        ([2.0, 2.0], [2.0, 2.0, 2.0], [0, 2]),  # no width: all in the last bucket
        ([], [0, 0, 0], [0, 0]),
        ([np.nan, np.inf], [0, 0, 0], [0, 0]),
        ([np.nan, 1.0, -np.inf, 3.0], [1.0, 2.0, 3.0], [1, 1]),
    ],
)
def test_histogram_of_identical_values(data, edges, counts, writer, tmp_path) -> None:
    sg.summary.histogram("h", np.array(data, np.float32), step=1, buckets=2)
    ((_, table),) = read(writer, tmp_path).tensors("h")
    assert table[:, 2].tolist() == counts
    assert [*table[:, 0], table[-1, 1]] == edges


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_image_of_bytes_is_read_pixel_by_pixel(channels, writer, tmp_path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (5, 4, 6, channels), np.uint8)
    assert sg.summary.image("picture", data, step=3, max_outputs=2) is True
    ((step, pictures),) = read(writer, tmp_path).images("picture")
    assert step == 3
    assert len(pictures) == 2
    for picture, wanted in zip(pictures, data, strict=False):
        np.testing.assert_array_equal(picture, wanted[:, :, 0] if channels == 1 else wanted)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (np.array([0.0, 0.5, 1.0, 2.0, -1.0, np.nan], np.float32), [0, 127, 255, 255, 0, 0]),
        (jnp.asarray([0.0, 1.0, 0.25], jnp.float16), [0, 255, 63]),
        (np.array([False, True]), [0, 255]),
        (np.array([0, 256, 65535], np.uint16), [0, 1, 255]),
        (np.array([-5, 0, 127], np.int8), [0, 0, 127]),
    ],
)
def test_image_of_other_numbers_is_clipped_to_bytes(data, wanted, writer, tmp_path) -> None:
    sg.summary.image("row", data[None, None, :, None], step=1)
    ((_, (picture,)),) = read(writer, tmp_path).images("row")
    assert picture.tolist() == [wanted]
