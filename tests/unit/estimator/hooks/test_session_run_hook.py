"""Base class of hooks, and its arguments and values."""

from __future__ import annotations

import pytest

from stratagem.estimator.hooks.session_run_hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)


def test_hook_that_overrides_nothing_asks_for_nothing() -> None:
    hook = SessionRunHook()
    context = SessionRunContext(SessionRunArgs("loss"), "session")
    hook.begin()
    hook.after_create_session("session", None)
    assert hook.before_run(context) is None
    hook.after_run(context, SessionRunValues(None))
    hook.end("session")
    assert not context.stop_requested


def test_context_tells_its_session_and_the_stop() -> None:
    context = SessionRunContext(SessionRunArgs("loss"), "session")
    context.request_stop()
    assert context.stop_requested
    assert (context.session, context.original_args.fetches) == ("session", "loss")


def test_feeding_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match=r"feed_dict=.* is not supported"):
        SessionRunArgs("loss", feed_dict={"x": 1})
