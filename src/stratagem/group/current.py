"""The group of this process: there is one at most, for as long as the process lives."""

from __future__ import annotations

from stratagem.group.member import Group

__all__ = ["current_group", "set_current_group"]

_groups: list[Group] = []


def current_group() -> Group | None:
    """Returns the group that this process belongs to; None for a process by itself."""
    return _groups[0] if _groups else None


def set_current_group(group: Group) -> None:
    """Makes a group that of this process.

    Args:
        group: the first and only one.
    """
    assert not _groups
    _groups.append(group)
