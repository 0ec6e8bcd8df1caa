"""Creation, flushing and closing of event files."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stratagem as sg
from stratagem.execution.summary import collector
from tests.unit.execution.summary.events import Read


@pytest.fixture(autouse=True)
def nothing_stays_the_default() -> Iterator[None]:
    with collector.override():
        yield


def test_file_is_made_with_the_first_summary(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    writer = sg.summary.create_file_writer(folder, filename_suffix=".mine")
    assert not folder.exists()
    with writer.as_default():
        sg.summary.scalar("a", 1.0, step=1)
    (file,) = folder.iterdir()
    assert file.name.startswith("events.out.tfevents.")
    assert file.name.endswith(".mine")
    assert len(Read(folder).tensors("a")) == 1  # a block that was left is flushed
    writer.close()


def test_init_makes_it_at_once(tmp_path: Path) -> None:
    for count in (1, 2):  # in one second, too
        writer = sg.summary.create_file_writer(tmp_path, flush_millis=0)
        writer.init()
        writer.init()
        assert len(list(tmp_path.iterdir())) == count
        writer.set_as_default(step=0)
        sg.summary.scalar("late", 0.0)
        assert len(Read(tmp_path).tensors("late")) == count  # a late one takes all to the file
        writer.close()


def test_flush_and_a_full_queue_give_summaries_to_readers(tmp_path: Path) -> None:
    writer = sg.summary.create_file_writer(tmp_path, max_queue=2, flush_millis=3_600_000)
    writer.set_as_default(step=0)
    sg.summary.scalar("a", 0.0)
    assert Read(tmp_path).tags == []
    writer.flush()
    assert len(Read(tmp_path).tensors("a")) == 1
    for _ in range(3):
        sg.summary.scalar("a", 0.0)
    assert len(Read(tmp_path).tensors("a")) == 4
    writer.close()


def test_closed_writer_is_refused(tmp_path: Path) -> None:
    writer = sg.summary.create_file_writer(tmp_path)
    with writer.as_default(step=1):
        writer.close()
        writer.close()
        writer.flush()
        with pytest.raises(RuntimeError, match="was used after it was closed"):
            sg.summary.scalar("a", 1.0)
    for use in (writer.init, writer.set_as_default, lambda: writer.as_default().__enter__()):
        with pytest.raises(RuntimeError, match="was used after it was closed"):
            use()


def test_noop_writer_writes_nothing() -> None:
    with sg.summary.create_noop_writer().as_default(step=1) as writer:
        assert sg.summary.should_record_summaries() is True
        assert sg.summary.scalar("a", 1.0) is False
        writer.init()
        writer.flush()
    writer.close()


def test_writer_stays_in_its_process(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        pickle.dumps(sg.summary.create_file_writer(tmp_path))


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="create_file_writer received logdir=''"):
        sg.summary.create_file_writer("")
    for name in ("max_queue", "flush_millis"):
        for value, error in ((-1, ValueError), (True, TypeError)):
            with pytest.raises(error, match=f"create_file_writer received {name}={value}"):
                sg.summary.create_file_writer(tmp_path, **{name: value})


def test_error_without_tensorboard_names_the_package(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ImportError, match=r"pip install stratagem\[observe\]"):
        sg.summary.create_file_writer(tmp_path)


@pytest.mark.slow
def test_end_of_the_program_closes_files_and_never_loads_tensorflow(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "import stratagem as sg\n"
        "import jax.numpy as jnp\n"
        f"sg.summary.create_file_writer({str(tmp_path)!r}).set_as_default(step=3)\n"
        "strategy = sg.OneDeviceStrategy('cpu:0')\n"
        "strategy.run(lambda: sg.summary.scalar('in_step', jnp.ones(())))\n"
        "sg.summary.scalar('on_host', 2.0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    found = Read(tmp_path)
    assert found.numbers("in_step") == [(3, 1.0)]
    assert found.numbers("on_host") == [(3, 2.0)]
