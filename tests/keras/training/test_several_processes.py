"""What `fit` changes in its arguments where several processes call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

from stratagem.keras.training import several_processes
from stratagem.keras.training.several_processes import settle_call
from stratagem.process_group import Identity


class Member:
    """A group in which all hand in the same."""

    def __init__(self, process_id: int) -> None:
        self.process_id = process_id
        self.identity = Identity(process_id, ("worker 0", "worker 1"), "localhost", 0)

    def exchange(self, name: str, value: Any) -> list[Any]:
        return [value, value]


@pytest.mark.parametrize("process_id", [0, 1])
def test_writers_work_on_process_0_and_folders_are_there_before(
    process_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_processes, "current_group", lambda: Member(process_id))
    monkeypatch.setattr(several_processes, "agree_on_random_state", lambda: None)
    writer = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    savers = [
        keras.callbacks.ModelCheckpoint(str(tmp_path / "a" / "b" / "model.keras")),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "c" / "of-{epoch}" / "model.keras")),
        keras.callbacks.ModelCheckpoint("model.keras"),
    ]
    arguments = {"verbose": 2, "callbacks": [writer, *savers]}

    assert settle_call(arguments, wants_logs=True)

    # Keras makes the folder when it saves, and fails where another process does at that moment.
    assert (tmp_path / "a" / "b").is_dir()
    assert (tmp_path / "c").is_dir()
    is_first = process_id == 0
    assert arguments["verbose"] == (2 if is_first else 0)
    assert arguments["callbacks"] == ([writer, *savers] if is_first else savers)


def test_one_callback_and_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_processes, "current_group", lambda: Member(1))
    monkeypatch.setattr(several_processes, "agree_on_random_state", lambda: None)
    arguments: dict[str, Any] = {"callbacks": keras.callbacks.CSVLogger(tmp_path / "log.csv")}
    assert not settle_call(arguments, wants_logs=False)
    assert arguments["callbacks"] == []
    arguments = {"callbacks": None}
    settle_call(arguments, wants_logs=False)
    assert arguments["callbacks"] is None
