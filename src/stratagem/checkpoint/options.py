"""How a checkpoint is written and read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

__all__ = ["CheckpointOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How a checkpoint is written and read.

    Args:
        enable_async: training goes on when the values are copied, and a process beside it writes.
            Where that fails, the next step, save or `sync` raises it.
        experimental_enable_async_checkpoint: the same, by its older name.
        restore_components: where there are as many replicas as there were, each gets its own part
            of an ON_READ variable again, so that training goes on to the last bit. Otherwise, and
            with another number of replicas, the parts are made of the value that they stand for.
        experimental_write_callbacks: called with the path when the checkpoint is there, on process
            0, in another thread where it is written behind training.

    Example:
        >>> import os, tempfile
        >>> behind = sg.train.CheckpointOptions(enable_async=True)
        >>> checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoint.save(folder + "/ckpt", options=behind)
        ...     checkpoint.sync()
        ...     os.path.isdir(path)
        True

    Source: TF 2.21 checkpoint_options.py, CheckpointOptions.
    """

    enable_async: bool = False
    experimental_enable_async_checkpoint: bool = False
    restore_components: bool = False
    experimental_write_callbacks: Sequence[Callable[[str], object]] = ()

    @property
    def is_async(self) -> bool:
        """Whether training goes on while it is written."""
        return self.enable_async or self.experimental_enable_async_checkpoint
