"""Options for writing and reading a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options for writing and reading a checkpoint.

    Args:
        enable_async: copies the values, then writes in a separate process while training continues.
            On accelerators the copy is on the device if it has room.
            If writing fails, the next step, save or `sync` raises the error.
        experimental_enable_async_checkpoint: older name of `enable_async`.
        restore_components: with the same number of replicas, restores each replica's component of
            ON_READ variables, so that training continues bit for bit. Otherwise the components
            are derived from the aggregated value.
        experimental_write_callbacks: called with the path when the checkpoint is complete, on
            process 0; in another thread if the write is asynchronous.

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
        """True if training continues during the write."""
        return self.enable_async or self.experimental_enable_async_checkpoint
