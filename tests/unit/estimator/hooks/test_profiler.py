"""ProfilerHook profiles single steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from stratagem.estimator.hooks.profiler import ProfilerHook
from tests.unit.estimator.hooks.fake_loop import FakeSession


def test_profiles_the_first_step_and_every_nth(tmp_path, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **options: calls.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    session = FakeSession(global_step=20)
    session.loop([ProfilerHook(save_steps=3, output_dir=tmp_path)], 5)
    first, second = tmp_path / "timeline-21", tmp_path / "timeline-24"
    assert calls == [first, "stop", second, "stop"]
    assert session.fetched == [(21, "loss"), (24, "loss")]


def test_profile_of_a_step_is_written(tmp_path) -> None:
    session = FakeSession(on_step=lambda step: jax.jit(jnp.sin)(jnp.ones(3)).block_until_ready())
    session.mode = "infer"
    session.loop([ProfilerHook(save_steps=100, output_dir=tmp_path)], 2)
    (trace,) = tmp_path.glob("timeline-1/plugins/profile/*/perfetto_trace.json.gz")
    assert trace.stat().st_size > 0
    assert session.fetched == [(1, "global_step")]


def test_profile_whose_step_does_not_come_is_ended(tmp_path, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **options: calls.append("go"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    hook, session = ProfilerHook(save_steps=1), FakeSession()

    class EndOfDataError(Exception):
        pass

    def fail(step: int) -> None:
        raise EndOfDataError

    failing = FakeSession(on_step=fail)
    with pytest.raises(EndOfDataError):
        failing.loop([hook], 1)
    hook.end(session)
    assert calls == ["go", "stop"]


def test_interval_has_to_be_one_of_two() -> None:
    with pytest.raises(ValueError, match="A timer received every_secs="):
        ProfilerHook()
