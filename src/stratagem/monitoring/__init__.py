"""Views of a run: the live terminal view, the HTML report and exports. Does not import JAX."""

from stratagem.monitoring.watcher import Watcher

__all__ = ["Watcher"]
