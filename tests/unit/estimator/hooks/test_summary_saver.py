"""SummarySaverHook writes summaries that TensorBoard reads."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.hooks.step_counter import SummarySaverHook
from tests.unit.estimator.hooks.fake_loop import FakeClock, FakeSession
from tests.unit.estimator.hooks.read_scalars import read_scalars


def session_of(tmp_path, **options) -> FakeSession:
    values = options.pop("values", lambda name, step: np.float32(step / 4))
    return FakeSession(str(tmp_path / "model"), values=values, **options)


def test_writes_the_first_step_and_every_nth(tmp_path) -> None:
    session = session_of(tmp_path, global_step=10)
    op = {"my_loss": "loss", "other": "x"}
    session.loop([SummarySaverHook(3, output_dir=tmp_path / "logs", summary_op=op)], 5)
    points = [(11, 2.75), (14, 3.5)]
    assert read_scalars(tmp_path / "logs") == {"my_loss": points, "other": points}
    assert [step for step, _ in session.fetched] == [11, 14]


def test_writes_every_n_seconds(tmp_path) -> None:
    clock = FakeClock()

    def pass_a_second(step: int) -> None:
        clock.now_s += 1

    session = session_of(tmp_path, on_step=pass_a_second)
    hook = SummarySaverHook(
        save_secs=2.5, output_dir=tmp_path / "logs", summary_op="loss", clock=clock
    )
    session.loop([hook], 9)
    assert [step for step, _ in read_scalars(tmp_path / "logs")["loss"]] == [1, 5, 9]


@pytest.mark.parametrize("is_given", [True, False])
def test_writer_is_the_given_one_or_the_sessions(tmp_path, is_given) -> None:
    session = session_of(tmp_path)
    writer = sg.summary.create_file_writer(str(tmp_path / "here"))
    options = {"summary_writer": writer}
    if not is_given:
        session.summary_writer, options = writer, {"output_dir": session.model_dir}
    session.loop([SummarySaverHook(1, summary_op=["loss"], **options)], 2)
    assert read_scalars(tmp_path / "here") == {"loss": [(1, 0.25), (2, 0.5)]}
    with writer.as_default(3):  # it is not the hook's to close
        sg.summary.scalar("loss", 0.75)
    writer.close()


def test_only_the_chief_writes(tmp_path) -> None:
    session = session_of(tmp_path)
    session.is_chief = False
    session.loop([SummarySaverHook(1, output_dir=tmp_path / "logs", summary_op="loss")], 2)
    assert not (tmp_path / "logs").exists()


def test_own_writer_is_made_anew_in_a_second_run(tmp_path) -> None:
    hook, session = SummarySaverHook(1, None, tmp_path / "logs", summary_op="loss"), None
    session = session_of(tmp_path)
    session.loop([hook], 1)
    session.loop([hook], 1)
    assert [step for step, _ in read_scalars(tmp_path / "logs")["loss"]] == [1, 2]


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="SummarySaverHook received summary_op=None"):
        SummarySaverHook(1)
    with pytest.raises(ValueError, match="received summary_op='loss', scaffold=<"):
        SummarySaverHook(1, summary_op="loss", scaffold=sg.estimator.Scaffold())
    with pytest.raises(ValueError, match="A timer received every_secs="):
        SummarySaverHook(summary_op="loss")
