"""Speed of the working tree beside another revision's, both in turns on one machine."""

from benchmarks.compare.command import compare

__all__ = ["compare"]
