"""The pages about these libraries print what they show, and name the tested versions."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from tests.docs.test_pages import differences

_DOCS = Path(__file__).parents[2] / "docs"
_FOLDER = _DOCS / "how_to"
_PAGES = (
    "guides/fine_tune.md",
    "how_to/flax_nnx.md",
    "how_to/keras_hub.md",
    "how_to/keras_rs.md",
    "how_to/optax.md",
    "how_to/third_party.md",
)
_DISTRIBUTIONS = {
    "KerasHub": "keras-hub",
    "KerasRS": "keras-rs",
    "KerasTuner": "keras-tuner",
    "Optax": "optax",
    "Flax NNX": "flax",
    "Haiku": "dm-haiku",
    "Equinox": "equinox",
    "scikit-learn": "scikit-learn",
    "Keras": "keras",
}
_ROW = re.compile(r"^\| \[?([\w -]+?)\]?(?:\([\w.#]+\))? \| ([\d.]+) \|", re.MULTILINE)


@pytest.mark.parametrize("name", _PAGES)
def test_page_prints_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a tuner writes into the current folder
    assert not differences((_DOCS / name).read_text(encoding="utf-8"), name)


def test_overview_has_the_installed_versions() -> None:
    rows = dict(_ROW.findall((_FOLDER / "third_party.md").read_text(encoding="utf-8")))
    installed = {name: importlib.metadata.version(of) for name, of in _DISTRIBUTIONS.items()}
    assert rows == installed
