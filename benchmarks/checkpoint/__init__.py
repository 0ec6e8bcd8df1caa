"""How long training waits for a save, beside Orbax by hand and torch.distributed.checkpoint."""

from benchmarks.checkpoint.run import run_checkpoint

__all__ = ["run_checkpoint"]
