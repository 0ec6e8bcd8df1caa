"""Buckets of histograms against NumPy, and pixels of images."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize("buckets", [None, 1, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
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
