"""Workers that pause at random, with and without a backup worker."""

from benchmarks.backup_workers.run import run_backup_workers

__all__ = ["run_backup_workers"]
