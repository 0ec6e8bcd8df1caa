"""Group of processes that train in lockstep: membership, failure detection, value exchange."""

from stratagem.process_group.current import current_group, set_current_group
from stratagem.process_group.identity import Identity
from stratagem.process_group.member import Group
from stratagem.process_group.random_state import agree_on_random_state
from stratagem.process_group.verdict import Activity, GroupLimits, Verdict

__all__ = [
    "Activity",
    "Group",
    "GroupLimits",
    "Identity",
    "Verdict",
    "agree_on_random_state",
    "current_group",
    "set_current_group",
]
