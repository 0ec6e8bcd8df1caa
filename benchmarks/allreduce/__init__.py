"""How fast arrays are summed between processes: each algorithm, beside PyTorch over Gloo."""

from benchmarks.allreduce.run import run_allreduce

__all__ = ["run_allreduce"]
