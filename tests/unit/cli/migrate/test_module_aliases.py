"""Assignments of modules."""

from __future__ import annotations

import pytest

from tests.unit.cli.migrate.programs import SG, body, rewritten


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("keras = tf.keras", "import keras"),
        ("k = tf.keras", "import keras as k"),
        ("layers = tf.keras.layers", "from keras import layers"),
        ("L = tf.keras.layers", "from keras import layers as L"),
    ],
)
def test_module_at_the_top(before, after) -> None:
    text = rewritten(f"import tensorflow as tf\n{before}\nx = 1\n")
    assert text.splitlines()[0] == SG.rstrip()
    assert after in text.splitlines()
    assert "tensorflow" not in text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Dense = tf.keras.layers.Dense\n", "Dense = keras.layers.Dense\n"),
        ("a = b = tf.keras\n", "a = b = keras\n"),
        ("a.b = tf.keras.layers\n", "a.b = keras.layers\n"),
        ("def f():\n    l = tf.keras.layers\n", "def f():\n    l = keras.layers\n"),
    ],
)
def test_other_assignments(before, after) -> None:
    assert body(before) == after
