"""What compiled programs send and when, read as `stratagem plan` reads it."""

from stratagem.planning.schedule import Reduction, Schedule, share_behind

__all__ = ["Reduction", "Schedule", "share_behind"]
