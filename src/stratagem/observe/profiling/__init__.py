"""Profiles of training steps: shares of their time, and the longest operations by layer."""

from stratagem.observe.profiling.summary import PARTS, ProfiledOperation, ProfileSummary
from stratagem.observe.profiling.trace_files import read_profile

__all__ = ["PARTS", "ProfileSummary", "ProfiledOperation", "read_profile"]
