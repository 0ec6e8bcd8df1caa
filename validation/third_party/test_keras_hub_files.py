"""Presets and exports of KerasHub in two processes: each file is written once, by process 0."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import keras_hub
import numpy as np
import pytest

from tests.multiprocess.cluster import run_cluster

_PROGRAM = Path(__file__).parent / "programs" / "keras_hub_files.py"
_FILES = {
    "generator": {
        "assets/tokenizer/merges.txt",
        "assets/tokenizer/vocabulary.json",
        "config.json",
        "metadata.json",
        "model.weights.h5",
        "preprocessor.json",
        "task.json",
        "tokenizer.json",
    },
    # Its own weights are in a file of their own, which KerasHub writes by `save_task_weights`.
    "classifier": {
        "config.json",
        "metadata.json",
        "model.weights.h5",
        "task.json",
        "task.weights.h5",
    },
    "exported": {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"},
}


def _values(model: Any) -> list[np.ndarray]:
    return [np.asarray(one) for one in model.get_weights()]


def _saved(folder: Path, name: str) -> list[np.ndarray]:
    """The values of both processes' models, which must be equal."""
    with np.load(folder / f"{name}-0.npz") as first, np.load(folder / f"{name}-1.npz") as second:
        assert first.files == second.files
        assert all(np.array_equal(first[key], second[key]) for key in first.files)
        return [first[key] for key in first.files]


@pytest.mark.skipif(not importlib.util.find_spec("safetensors"), reason="needs safetensors")
def test_process_0_writes_presets_and_exports(tmp_path: Path) -> None:
    for ended in run_cluster([str(_PROGRAM), str(tmp_path)], 2):
        assert ended.code == 0, ended.errors
    first, second = (json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in (0, 1))
    for name, expected in _FILES.items():
        counts = Counter(first[name]["written"])
        # safetensors opens its file itself. Loose files of a tokenizer are merged into one.
        assert counts.keys() >= expected - {"model.safetensors"}
        assert set(counts.values()) == {1}, name
        assert second[name]["written"] == [], name
        files = {
            str(path.relative_to(tmp_path / name)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        assert files.keys() == expected
        assert first[name]["files"] == second[name]["files"] == files  # complete on return
    models = keras_hub.models
    generator = models.Llama3CausalLM.from_preset(str(tmp_path / "generator"))
    classifier = models.BertTextClassifier.from_preset(
        str(tmp_path / "classifier"), preprocessor=None
    )
    exported = models.Llama3Backbone.from_preset(str(tmp_path / "exported"))
    opened = {"generator": generator, "classifier": classifier}
    for name, model in opened.items():
        assert all(map(np.array_equal, _values(model), _saved(tmp_path, name))), name
    assert generator.preprocessor.tokenizer.vocabulary_size() == 8
    assert all(map(np.array_equal, _values(exported), _values(generator.backbone)))
