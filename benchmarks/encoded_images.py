"""JPEG images in memory and what it costs to decode them: input as slow as that of many a job."""

from __future__ import annotations

import functools
import io
import time

import numpy as np

from benchmarks.workloads import Array

__all__ = ["IMAGE_SHAPE", "decode", "decoding_s", "encoded_images", "labelled_image"]

IMAGE_SHAPE = (224, 224, 3)
_NUM_IMAGES = 64
_SIZE = 288  # decoding and resizing one takes about 2 ms
_NUM_CLASSES = 10


@functools.cache
def encoded_images() -> list[bytes]:
    """Returns images of smooth noise, which compress as photographs do. Always the same."""
    from PIL import Image  # here and below: not everybody who lists the benchmarks has Pillow

    rng = np.random.default_rng(0)
    images: list[bytes] = []
    for _ in range(_NUM_IMAGES):
        coarse = rng.integers(0, 256, (_SIZE // 8, _SIZE // 8, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((_SIZE, _SIZE), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=90)
        images.append(buffer.getvalue())
    return images


def decode(encoded: bytes) -> Array:
    """Returns the pixels, uint8 of `IMAGE_SHAPE`."""
    from PIL import Image

    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    return np.asarray(image.resize(IMAGE_SHAPE[:2]))


def labelled_image(index: int) -> tuple[Array, Array]:
    """Returns an example by its number; Grain's workers call it."""
    images = encoded_images()
    return decode(images[index % len(images)]), np.int32(index % _NUM_CLASSES)


def decoding_s() -> float:
    """Measures what decoding one image takes here, undisturbed."""
    encoded_images()
    times_s: list[float] = []
    for index in range(100):
        start_s = time.perf_counter()
        labelled_image(index)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)
