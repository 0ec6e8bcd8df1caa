"""The group of this process: at most one for the lifetime of the process."""

from __future__ import annotations

from stratagem import logs
from stratagem.group.member import Group

_groups: list[Group] = []


def current_group() -> Group | None:
    """Returns the group of this process, or None for a single process."""
    return _groups[0] if _groups else None


def set_current_group(group: Group) -> None:
    """Sets the group of this process, once."""
    assert not _groups
    _groups.append(group)
    logs.set_task(group.identity.label, group.identity.process_id)
