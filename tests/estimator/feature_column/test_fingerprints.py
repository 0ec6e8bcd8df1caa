"""Fingerprints match TensorFlow's in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stratagem.estimator.feature_column import fingerprints
from stratagem.estimator.feature_column.fingerprints import concatenated_fingerprint, fingerprint

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
        f"import runpy; names = runpy.run_path({fingerprints.__file__!r});"
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
