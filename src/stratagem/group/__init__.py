"""The processes that train in lockstep: they come together, watch each other, exchange values."""

from stratagem.group.current import current_group, set_current_group
from stratagem.group.identity import Identity
from stratagem.group.member import Group
from stratagem.group.random_state import agree_on_random_state
from stratagem.group.verdict import Kind, Limits, Verdict

__all__ = [
    "Group",
    "Identity",
    "Kind",
    "Limits",
    "Verdict",
    "agree_on_random_state",
    "current_group",
    "set_current_group",
]
