"""Fingerprints match TensorFlow's in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from stratagem.parameter_server import fingerprints as module
from stratagem.parameter_server.fingerprints import (
    concatenated_fingerprint,
    fingerprint,
    fingerprints,
)

# Of FarmHash 1.1 (pyfarmhash 0.5.1, fingerprint64), one for each branch of the algorithm.
FINGERPRINTS = [
    (b"", 11160318154034397263),
    (b"a", 12917804110809363939),
    (b"blue", 10660015788068286345),
    (b"Thursday", 6237322437236285668),
    (b"x" * 20, 8233088228747857348),
    (b"stratagem" * 5, 1688828096076320655),
    (b"stratagem" * 30, 1628840974559416250),
]


@pytest.mark.parametrize(("text", "expected"), FINGERPRINTS, ids=lambda value: str(value)[:12])
def test_fingerprint_is_that_of_farmhash(text, expected) -> None:
    assert fingerprint(text) == expected


def test_fingerprint_is_the_same_in_a_process_with_another_seed_of_pythons_hash() -> None:
    program = (
        f"import runpy; names = runpy.run_path({module.__file__!r});"
        "print(names['fingerprint'](b'Thursday'))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    assert int(printed) == 6237322437236285668


def test_fingerprints_are_put_together_in_their_order() -> None:
    assert concatenated_fingerprint(1, 2) != concatenated_fingerprint(2, 1)
    assert 0 <= concatenated_fingerprint(2**64 - 1, 2**64 - 1) < 2**64


RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, 256, size, "uint8").tobytes() for size in [*range(70), 127, 128, 300] * 2]


def of_each(texts: list[bytes]) -> list[int]:
    return [fingerprint(text) for text in texts]


def test_array_of_bytes_of_every_length_has_the_fingerprint_of_each() -> None:
    array = np.empty(len(TEXTS), object)
    array[:] = TEXTS
    assert fingerprints(array).tolist() == of_each(TEXTS)


@pytest.mark.parametrize("kind", ["U", "S", "O"])
def test_arrays_of_each_type_of_string_agree(kind) -> None:
    texts = ["", "a", "user_17", "x" * 20, "stratagem" * 5, "stratagem" * 30]
    array = np.array(texts, dtype=kind).reshape(2, 3)
    assert fingerprints(array).ravel().tolist() == of_each([text.encode() for text in texts])


def test_other_characters_are_utf_8() -> None:
    texts = np.array(["Zürich", "東京", "plain"])
    assert fingerprints(texts).tolist() == of_each([text.encode() for text in texts.tolist()])


def test_more_strings_than_are_hashed_at_once() -> None:
    texts = np.array([f"{number:06}" for number in range(9000)])
    assert fingerprints(texts)[::1000].tolist() == of_each(texts[::1000].astype("S").tolist())


def test_object_that_is_no_string_is_refused() -> None:
    with pytest.raises(TypeError, match="a value of type float is no string"):
        fingerprints(np.array(["a", 1.5], object))
