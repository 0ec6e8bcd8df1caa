"""Rows of embedding tables beside TorchRec, TensorFlow and its recommenders-addons."""

from benchmarks.recommenders.run import run_recommenders

__all__ = ["run_recommenders"]
