"""Training over slow links: time, steps and bytes to the same validation loss."""

from benchmarks.slow_links.run import run_slow_links

__all__ = ["run_slow_links"]
