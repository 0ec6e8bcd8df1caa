"""Input that costs time: images that are decoded, and objects of a slow storage.

NumPy is imported, and Pillow by what needs it: not everybody who lists benchmarks has it.
"""

from __future__ import annotations

import functools
import io
import time
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

BATCH_SIZE = 16
_NUM_CLASSES = 10
_NUM_IMAGES, _ENCODED_SIZE, _SIZE = 64, 288, 224  # decoding and resizing one takes about 2 ms
_LATENCY_S = 0.16  # until the first byte of an object


@functools.cache
def _encoded_images() -> list[bytes]:
    """Returns images of smooth noise, which compress as photographs do. Always the same."""
    from PIL import Image

    rng = np.random.default_rng(0)
    coarse_size, size = _ENCODED_SIZE // 8, (_ENCODED_SIZE, _ENCODED_SIZE)
    images: list[bytes] = []
    for _ in range(_NUM_IMAGES):
        coarse = rng.integers(0, 256, (coarse_size, coarse_size, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        image.save(buffer, "JPEG", quality=90)
        images.append(buffer.getvalue())
    return images


def labelled_image(index: int) -> tuple[Array, Array]:
    """Returns an example by its number; Grain's workers call it."""
    from PIL import Image

    images = _encoded_images()
    image = Image.open(io.BytesIO(images[index % len(images)])).convert("RGB")
    return np.asarray(image.resize((_SIZE, _SIZE))), np.int32(index % _NUM_CLASSES)


def decoding_s() -> float:
    """Measures what decoding one image takes here, undisturbed."""
    _encoded_images()
    times_s: list[float] = []
    for index in range(100):
        start_s = time.perf_counter()
        labelled_image(index)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def make_batch(work: str, number: int) -> tuple[Array, Array]:
    """Returns a batch by its number: the time that it takes is what a device waits for."""
    places = range(BATCH_SIZE * number, BATCH_SIZE * (number + 1))
    if work == "jpeg":
        pixels, labels = zip(*map(labelled_image, places), strict=True)
        return np.stack(pixels), np.stack(labels)
    time.sleep(_LATENCY_S)
    return _object().copy(), np.array(places, np.int32) % _NUM_CLASSES


@functools.cache
def _object() -> Array:
    return np.random.default_rng(0).integers(0, 256, (BATCH_SIZE, _SIZE, _SIZE, 3), np.uint8)
