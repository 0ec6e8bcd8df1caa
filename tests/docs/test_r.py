"""The page about R, run by R: `make test-external NAME=r` installs it from Debian's packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "how_to" / "r.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_LIMIT_S = 300

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("Rscript") is None, reason="needs r-base-core and r-cran-reticulate"
    ),
]


def _blocks(heading: str, language: str) -> list[str]:
    """Blocks in a language below a heading."""
    section = _PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [match["code"] for match in _BLOCK.finditer(section) if match["language"] == language]


def _run(command: list[str], folder: Path, **variables: str) -> str:
    folder.mkdir(exist_ok=True)
    completed = subprocess.run(
        command,
        cwd=folder,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
            "PYTHONPATH": str(_ROOT / "src"),
            "RETICULATE_PYTHON": sys.executable,
            **variables,
        },
        text=True,
        capture_output=True,
        timeout=_LIMIT_S,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def _rscript(code: str, folder: Path, **variables: str) -> str:
    script = folder / "page.R"
    script.write_text(code)
    return _run(["Rscript", str(script)], folder, **variables)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page's program leaves; it has printed what the page shows."""
    made = tmp_path_factory.mktemp("r")
    code, shown = ("".join(_blocks("Fit, save and load", language)) for language in ("r", "text"))
    assert _rscript(code, made) == shown
    return made


_SAME_CALLS = """
import stratagem as sg  # before keras
import keras
import numpy as np
from sklearn.datasets import load_digits

x, y = load_digits(return_X_y=True)
x = x / 16
strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
keras.utils.set_random_seed(7)
with strategy.scope():
    model = keras.Sequential()
    model.add(keras.layers.Input((64,)))
    model.add(keras.layers.Dense(10, activation="softmax"))
model.compile(loss="sparse_categorical_crossentropy", optimizer="rmsprop", metrics=["accuracy"])
model.fit(x, y, batch_size=128, epochs=40, verbose=0)
np.save("predictions.npy", model.predict(x, verbose=0))
"""


def test_predictions_equal_those_of_python(folder: Path, tmp_path: Path) -> None:
    _run([sys.executable, "-c", _SAME_CALLS], tmp_path)
    expected = np.load(tmp_path / "predictions.npy")
    assert expected.max() > 0.5  # it has learned something
    np.testing.assert_array_equal(np.load(folder / "predictions.npy"), expected)


def test_python_loads_what_r_saved(folder: Path, tmp_path: Path) -> None:
    code = f"""
import stratagem
import keras, numpy as np
from sklearn.datasets import load_digits
model = keras.saving.load_model({str(folder / "digits.keras")!r})
predictions = model.predict(load_digits(return_X_y=True)[0] / 16, verbose=0)
np.save("predictions.npy", predictions)
"""
    _run([sys.executable, "-c", code], tmp_path)
    # One program for one device, the other for two: XLA may add in another order.
    np.testing.assert_allclose(
        np.load(folder / "predictions.npy"), np.load(tmp_path / "predictions.npy"), atol=1e-6
    )


def test_cluster_of_the_page_is_tf_config(tmp_path: Path) -> None:
    (block,) = _blocks("Several machines", "r")
    setting = block.partition("strategy <-")[0]
    printed = _rscript(f'{setting}\ncat(Sys.getenv("TF_CONFIG"))', tmp_path)
    assert json.loads(printed) == {
        "cluster": {"worker": ["host0:2222", "host1:2222"]},
        "task": {"type": "worker", "index": 0},
    }


def test_launcher_starts_rscript(tmp_path: Path) -> None:
    script = str(_ROOT / "examples" / "r" / "digits.R")
    launch = [sys.executable, "-m", "stratagem", "launch", "--workers", "2", "Rscript", script]
    printed = _run(launch, tmp_path, JAX_NUM_CPU_DEVICES="1")
    assert printed.count("2 replicas, validation accuracy 0.9") == 2
