"""What `fit` changes in its arguments where several processes call it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest

from stratagem.group.current import Identity
from stratagem.keras.training import several_processes
from stratagem.keras.training.several_processes import settle_call, written_by_first
from stratagem.keras.variables.stored_value import announce_gather


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


class Scripted:
    """A group whose process 0 sends given messages, and that records what is sent."""

    def __init__(self, process_id: int, messages: list[Any]) -> None:
        self.process_id, self.messages = process_id, messages
        self.identity = Identity(process_id, ("worker 0", "worker 1"), "localhost", 0)
        self.sent: list[Any] = []

    def exchange(self, name: str, value: Any) -> list[Any]:
        assert name.startswith(("model.save", "keras.saving.save_"))
        self.sent.append(value)
        return [value if self.process_id == 0 else self.messages.pop(0), None]


class Gathered:
    def __init__(self) -> None:
        self.count = 0

    def gathered(self) -> None:
        self.count += 1


def _message(gather: list[Any] | None, error: str | None = None) -> dict[str, Any]:
    return {"gather": gather, "error": error}


@pytest.mark.parametrize("fails", [False, True])
def test_process_0_asks_for_each_value_it_reads(fails: bool) -> None:
    variables: Any = {("layer/kernel", 0): Gathered(), ("layer/kernel", 1): Gathered()}
    group: Any = Scripted(0, [])

    def write() -> str:
        announce_gather(variables["layer/kernel", 1])
        announce_gather(variables["layer/kernel", 0])
        if fails:
            raise OSError("disk is full")
        return "path"

    result, error, text = written_by_first("model.save", group, variables, write)
    expected = "OSError('disk is full')" if fails else None
    assert (result, text) == (None if fails else "path", expected)
    assert isinstance(error, OSError) is fails
    asked = [_message(["layer/kernel", 1]), _message(["layer/kernel", 0])]
    assert group.sent == [*asked, _message(None, expected)]
    announce_gather(variables["layer/kernel", 0])
    assert len(group.sent) == 3  # the file is written


def test_other_processes_join_the_gathers() -> None:
    variables: Any = {("kernel", 0): Gathered(), ("bias", 0): Gathered()}
    messages = [_message(["bias", 0]), _message(["bias", 0]), _message(None, "full")]
    group: Any = Scripted(1, messages)
    done = written_by_first("model.save", group, variables, pytest.fail)
    assert done == (None, None, "full")
    assert [one.count for one in variables.values()] == [0, 2]


class Preset(keras.Model):
    """Saves as a model of KerasHub does: other files, then weights by `save_weights`."""

    def save_to_preset(self, folder: Path) -> None:
        folder.mkdir()  # fails if two processes do
        (folder / "config.json").touch()
        self.save_weights(folder / "model.weights.h5")


def _preset(group: Any, monkeypatch: pytest.MonkeyPatch) -> Preset:
    topology = SimpleNamespace(spans_processes=True)
    variables = SimpleNamespace(live=list)
    home = SimpleNamespace(strategy=SimpleNamespace(topology=topology, variables=variables))
    monkeypatch.setattr(several_processes, "current_group", lambda: group)
    monkeypatch.setattr(several_processes, "home_of", lambda variable: home)
    inputs = keras.Input((1,))
    return Preset(inputs, keras.layers.Dense(1)(inputs))


# Keras 3.15 converts its own variables in a manner that NumPy 2 warns about.
@pytest.mark.parametrize("process_id", [0, 1])
def test_process_0_writes_all_files_of_a_preset(
    process_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Scripted(process_id, [_message(None)])
    _preset(group, monkeypatch).save_to_preset(tmp_path / "preset")
    files = sorted(path.name for path in tmp_path.glob("*/*"))
    assert files == (["config.json", "model.weights.h5"] if process_id == 0 else [])
    assert group.sent == [_message(None) if process_id == 0 else None]  # one exchange, at the end


@pytest.mark.parametrize(
    ("save", "name"),
    [
        (keras.saving.save_model, "model.keras"),
        (keras.models.save_model, "model.keras"),
        (keras.saving.save_weights, "model.weights.h5"),
    ],
    ids=["saving", "models", "weights"],
)
@pytest.mark.parametrize("process_id", [0, 1])
def test_process_0_writes_the_file_of_a_function(
    save: Any, name: str, process_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Scripted(process_id, [_message(None)])
    save(model=_preset(group, monkeypatch), filepath=tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ([name] if process_id == 0 else [])
    assert group.sent == [_message(None) if process_id == 0 else None]
    group = Scripted(1, [_message(None, "OSError: full")])
    with pytest.raises(RuntimeError, match=rf"failed in keras\.saving\.{save.__name__}: OSError"):
        save(_preset(group, monkeypatch), tmp_path / name)


def test_functions_refuse_other_objects_as_keras_does(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="'int' object has no attribute"):
        keras.saving.save_model(1, tmp_path / "model.keras")


def test_errors_of_process_0_are_raised_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Scripted(0, [])
    with pytest.raises(FileNotFoundError):
        _preset(group, monkeypatch).save_to_preset(tmp_path / "missing" / "preset")
    assert "FileNotFoundError" in group.sent[-1]["error"]
    group = Scripted(1, [_message(None, group.sent[-1]["error"])])
    with pytest.raises(RuntimeError, match=r"worker 0 failed in model\.save_to_preset: File"):
        _preset(group, monkeypatch).save_to_preset(tmp_path / "preset")
