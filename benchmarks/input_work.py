"""Batches that cost time: JPEG, tokens, objects of a slow storage. All sides make the same ones.

A batch follows from its number. This module needs NumPy, and Pillow or tokenizers for what they do.
"""

from __future__ import annotations

import functools
import io
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["WORK", "make_batch"]

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

WORK = ("jpeg", "tokens", "objects")
_SIZE, _NUM_CLASSES = 224, 10
_NUM_IMAGES, _BATCH_OF_IMAGES = 256, 16
_NUM_TEXTS, _BATCH_OF_TEXTS, _NUM_TOKENS, _NUM_WORDS = 512, 64, 256, 280
_NUM_OBJECTS = 16
_LATENCY_S = 0.16  # until the first byte of an object


def make_batch(work: str, number: int) -> Arrays:
    """Returns a batch by its number: the time that it takes is what a device waits for."""
    return {"jpeg": _images, "tokens": _tokens, "objects": _object}[work](number)


@functools.cache
def _folder(work: str) -> Path:
    """Writes what the batches of a work are made from, once on this machine; returns its folder."""
    folder = Path(tempfile.gettempdir(), f"stratagem-bench-{os.getuid()}", f"input_service_{work}")
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent))
        {"jpeg": _write_images, "tokens": _write_texts, "objects": _write_objects}[work](new)
        new.rename(folder)
    return folder


def _images(number: int) -> Arrays:
    """A crop of random size and place, resized, and flipped by chance, as ImageNet's training."""
    from PIL import Image

    rng = np.random.default_rng(number)
    pixels = np.empty((_BATCH_OF_IMAGES, _SIZE, _SIZE, 3), np.uint8)
    first = number * _BATCH_OF_IMAGES
    for place in range(_BATCH_OF_IMAGES):
        encoded = (_folder("jpeg") / f"{(first + place) % _NUM_IMAGES}.jpeg").read_bytes()
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        width, height = image.size
        side = int(min(width, height) * rng.uniform(0.5, 1))
        left, top = rng.integers(width - side + 1), rng.integers(height - side + 1)
        box = (left, top, left + side, top + side)
        image = image.resize((_SIZE, _SIZE), Image.Resampling.BILINEAR, box=box)
        pixels[place] = image
        if rng.random() < 0.5:
            pixels[place] = pixels[place, :, ::-1]
    return pixels, np.arange(first, first + _BATCH_OF_IMAGES, dtype=np.int32) % _NUM_CLASSES


@functools.cache
def _texts() -> list[str]:
    return (_folder("tokens") / "texts.txt").read_text(encoding="utf-8").splitlines()


@functools.cache
def _tokenizer() -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one core
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_folder("tokens") / "tokenizer.json"))
    tokenizer.enable_truncation(_NUM_TOKENS)
    tokenizer.enable_padding(length=_NUM_TOKENS)
    return tokenizer


def _tokens(number: int) -> Arrays:
    first = number * _BATCH_OF_TEXTS
    numbers = [(first + place) % _NUM_TEXTS for place in range(_BATCH_OF_TEXTS)]
    found = _tokenizer().encode_batch([_texts()[one] for one in numbers])
    ids = np.array([one.ids for one in found], np.int32)
    return ids, np.array(numbers, np.int32) % _NUM_CLASSES


def _object(number: int) -> Arrays:
    time.sleep(_LATENCY_S)
    pixels = np.load(_folder("objects") / f"object-{number % _NUM_OBJECTS}.npy")
    return pixels, np.full(len(pixels), number % _NUM_CLASSES, np.int32)


def _write_images(folder: Path) -> None:
    """Smooth noise of 500 x 375, the usual size of ImageNet, which compresses as photographs do."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(_NUM_IMAGES):
        coarse = rng.integers(0, 256, (47, 62, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
        image.save(folder / f"{number}.jpeg", "JPEG", quality=90)


def _write_texts(folder: Path) -> None:
    """Texts of words by Zipf's law, and a tokenizer of byte pairs that is trained on them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    rng = np.random.default_rng(0)
    syllables = [first + vowel for first in "bcdfghklmnprstvwz" for vowel in "aeiou"]
    words = ["".join(rng.choice(syllables, rng.integers(1, 6))) for _ in range(20_000)]
    texts = [
        " ".join(words[min(rank, len(words)) - 1] for rank in rng.zipf(1.2, _NUM_WORDS))
        for _ in range(_NUM_TEXTS)
    ]
    (folder / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=8_000, special_tokens=["[PAD]", "[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_objects(folder: Path) -> None:
    for number in range(_NUM_OBJECTS):
        rng = np.random.default_rng(number)
        shape = _BATCH_OF_IMAGES, _SIZE, _SIZE, 3
        np.save(folder / f"object-{number}.npy", rng.integers(0, 256, shape, np.uint8))
