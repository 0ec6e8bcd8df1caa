"""Images in files of several formats, and how our side of the benchmark reads them."""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import image_files
from benchmarks.encoded_images import IMAGE_SHAPE, decode, encoded_images
from benchmarks.workers import stratagem_files

_NUM_EXAMPLES = 24


@pytest.fixture(autouse=True)
def few_examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(image_files, "_NUM_EXAMPLES", _NUM_EXAMPLES)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("file_format", image_files.FORMATS)
def test_every_example_is_read(file_format: str) -> None:
    if file_format == "Parquet" and importlib.util.find_spec("pyarrow") is None:
        pytest.skip("needs pyarrow, which the environment of the peers has")
    paths = image_files.image_files(file_format)
    assert image_files.image_files(file_format) == paths  # written once
    read: Any = stratagem_files._READERS[file_format](paths)
    labels = []
    for image, label in itertools.islice(read, _NUM_EXAMPLES):
        assert image.shape == IMAGE_SHAPE
        assert image.dtype == np.uint8
        labels.append(int(label))
    assert sorted(labels) == sorted(number % 10 for number in range(_NUM_EXAMPLES))


def test_record_is_parsed() -> None:
    encoded = encoded_images()[0]
    image, label = image_files.parse(image_files._record((encoded, 7)))
    assert label == 7
    np.testing.assert_array_equal(image, decode(encoded))
