"""Summaries written on the host match what TensorBoard's reader finds."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from tests.unit.execution.summary.events import Read


@pytest.fixture
def writer(tmp_path: Path):
    with sg.summary.create_file_writer(tmp_path).as_default() as one:
        yield one
        one.close()


def read(writer, folder: Path) -> Read:
    writer.close()
    return Read(folder)


@pytest.mark.parametrize(
    "number",
    [
        0.25,
        7,
        True,
        np.float64(1e-3),
        np.array(3, np.int32),
        jnp.asarray(1.5, jnp.bfloat16),
    ],
)
def test_scalar_is_a_float_of_32_bits(number, writer, tmp_path) -> None:
    assert sg.summary.scalar("loss", number, step=2, description="of *training*") is True
    found = read(writer, tmp_path)
    assert found.numbers("loss") == [(2, float(np.float32(number)))]
    assert found.description("loss") == "of *training*"
    assert found.tensors("loss")[0][1].dtype == np.float32


def test_scalar_takes_variables(writer, tmp_path) -> None:
    count = sg.Variable(4, dtype="int32")
    sg.summary.scalar("of_variables", sg.Variable(2.5), step=count)
    assert read(writer, tmp_path).numbers("of_variables") == [(4, 2.5)]


def test_text_is_bytes_in_the_shape_of_its_lists(writer, tmp_path) -> None:
    assert sg.summary.text("remark", "größer", step=1) is True
    sg.summary.text("table", [["a", "b"], ["c", "d"]], step=2)
    found = read(writer, tmp_path)
    ((_, remark),) = found.tensors("remark")
    ((_, table),) = found.tensors("table")
    assert found.plugin("remark") == "text"
    assert remark.item().decode() == "größer"
    assert table.tolist() == [[b"a", b"b"], [b"c", b"d"]]


def test_write_takes_arrays_strings_and_metadata(writer, tmp_path) -> None:
    from tensorboard.plugins.scalar.metadata import create_summary_metadata

    metadata = create_summary_metadata(None, None)
    sg.summary.write("plain", np.arange(4, dtype=np.int32).reshape(2, 2), step=1)
    sg.summary.write("words", "layers", step=1)
    sg.summary.write("loss", np.float32(2), step=1, metadata=metadata)
    sg.summary.write("bytes", np.float32(3), step=1, metadata=metadata.SerializeToString())
    found = read(writer, tmp_path)
    assert found.tensors("plain")[0][1].tolist() == [[0, 1], [2, 3]]
    assert found.tensors("words")[0][1].item() == b"layers"
    assert found.numbers("loss") == [(1, 2.0)]
    assert found.numbers("bytes") == [(1, 3.0)]


def test_without_a_writer_nothing_is_written_and_no_step_is_asked_for() -> None:
    assert sg.summary.scalar("loss", 1.0) is False
    assert sg.summary.histogram("h", [1.0]) is False
    assert sg.summary.image("i", np.zeros((1, 2, 2, 1))) is False
    assert sg.summary.text("t", "words") is False
    assert sg.summary.write("w", np.zeros(3)) is False


def test_summary_without_a_step_is_refused(writer) -> None:
    with pytest.raises(ValueError, match="has no step"):
        sg.summary.scalar("loss", 1.0)


def test_wrong_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"received data of shape \(2,\)"):
        sg.summary.scalar("loss", [1.0, 2.0], step=1)
    for wrong in ("words", 1j, None):
        with pytest.raises(TypeError, match=r"received data of type \w+ and dtype"):
            sg.summary.scalar("loss", wrong, step=1)
    with pytest.raises(ValueError, match="received buckets=0"):
        sg.summary.histogram("h", [1.0], step=1, buckets=0)
    for shape in ((2, 2), (1, 2, 2, 5)):
        with pytest.raises(ValueError, match="received images of shape"):
            sg.summary.image("i", np.zeros(shape), step=1)
    with pytest.raises(ValueError, match="received max_outputs=-1"):
        sg.summary.image("i", np.zeros((1, 2, 2, 1)), step=1, max_outputs=-1)
    with pytest.raises(TypeError, match="received text of type int"):
        sg.summary.text("t", 3, step=1)
