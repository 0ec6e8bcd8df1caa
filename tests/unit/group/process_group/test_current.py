"""The group of this process, and the name that its log records get."""

from __future__ import annotations

import types

import pytest

from stratagem import logs
from stratagem.group import current
from stratagem.group.current import Identity, current_group, set_current_group


def test_group_is_set_once_and_names_this_process_in_logs(monkeypatch) -> None:
    monkeypatch.setattr(current, "_groups", [])
    monkeypatch.setattr(logs._LogState, "task", None)
    assert current_group() is None
    identity = Identity(process_id=1, labels=("worker 0", "worker 1"), host="a", port=1)
    group = types.SimpleNamespace(identity=identity)
    set_current_group(group)
    assert current_group() is group
    assert logs._LogState.task == ("worker 1", 1)
    with pytest.raises(AssertionError):
        set_current_group(group)
