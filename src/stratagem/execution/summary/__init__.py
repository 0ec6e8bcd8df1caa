"""Summaries for TensorBoard, like `tf.summary` but without TensorFlow.

Write them on the host, in replica functions, in an `sg.function`, and in Keras layers.
"""

from stratagem.execution.summary import experimental as experimental
from stratagem.execution.summary.collector import (
    get_step,
    record_if,
    set_step,
    should_record_summaries,
)
from stratagem.execution.summary.kinds import histogram, image, scalar, text, write
from stratagem.execution.summary.writer import SummaryWriter, create_file_writer, create_noop_writer

__all__ = [
    "SummaryWriter",
    "create_file_writer",
    "create_noop_writer",
    "get_step",
    "histogram",
    "image",
    "record_if",
    "scalar",
    "set_step",
    "should_record_summaries",
    "text",
    "write",
]
