"""Saves models of KerasHub in two processes, and writes which files each process opened.

`python keras_hub_files.py FOLDER`, with TF_CONFIG, and two devices a process. A call that fails
does not end the program.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import jax
import keras
import keras_hub
import numpy as np

import stratagem as sg

jax.config.update("jax_num_cpu_devices", 2)
folder = Path(sys.argv[1])
strategy = sg.MultiWorkerMirroredStrategy(shard_state="all")
written: list[str] = []
_SIZES = {"vocabulary_size": 64, "num_layers": 1, "hidden_dim": 64, "intermediate_dim": 64}
_WORDS = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")


def _note_python_file(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and set(str(arguments[1])) & set("wax+"):
        written.append(str(arguments[0]))


class _NotedFile(h5py.File):
    """HDF5's library opens its files itself."""

    def __init__(self, name: Any, mode: str = "r", **options: Any) -> None:
        if mode != "r":
            written.append(str(name))
        super().__init__(name, mode, **options)


def _made() -> tuple[Any, Any]:
    words = [*(f"<|{word}|>" for word in _WORDS), "a", "b", "ab"]
    tokenizer = keras_hub.models.Llama3Tokenizer(
        vocabulary={word: index for index, word in enumerate(words)}, merges=["a b"]
    )
    preprocessor = keras_hub.models.Llama3CausalLMPreprocessor(tokenizer, sequence_length=8)
    llama = keras_hub.models.Llama3Backbone(num_query_heads=4, num_key_value_heads=2, **_SIZES)
    bert = keras_hub.models.BertBackbone(num_heads=2, max_sequence_length=8, **_SIZES)
    return (
        keras_hub.models.Llama3CausalLM(llama, preprocessor=preprocessor),
        keras_hub.models.BertTextClassifier(bert, num_classes=64, preprocessor=None),
    )


def _called(call: Callable[[str], None], name: str) -> dict[str, Any]:
    """Returns the files that this process opened to write, and all files on return."""
    written.clear()
    call(str(folder / name))
    inside = [Path(path) for path in written if Path(path).is_relative_to(folder)]
    files = [path for path in (folder / name).rglob("*") if path.is_file()]
    return {
        "written": [str(path.relative_to(folder / name)) for path in inside],
        "files": {
            str(path.relative_to(folder / name)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
        },
    }


if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    with strategy.scope():
        generator, classifier = _made()
    setattr(h5py, "File", _NotedFile)  # noqa: B010 - a class, for a type checker
    sys.addaudithook(_note_python_file)
    report = {
        "generator": _called(generator.save_to_preset, "generator"),
        "classifier": _called(classifier.save_to_preset, "classifier"),
        "exported": _called(generator.export_to_transformers, "exported"),
    }
    rank = jax.process_index()
    for name, model in (("generator", generator), ("classifier", classifier)):
        values = dict(enumerate(model.get_weights()))  # all processes gather
        np.savez(folder / f"{name}-{rank}.npz", **{str(key): one for key, one in values.items()})
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
