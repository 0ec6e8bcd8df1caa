"""Profiles of training steps: shares of their time, and the longest operations by layer."""

from stratagem.observe.profiling.recorder import read_profile
from stratagem.observe.profiling.summary import PARTS, ProfiledOperation, ProfileSummary

__all__ = ["PARTS", "ProfileSummary", "ProfiledOperation", "read_profile"]
