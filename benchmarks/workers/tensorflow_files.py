"""Peer: files of images, read by `tf.data`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks.encoded_images import IMAGE_SHAPE
from benchmarks.image_files import NUM_READERS, image_files
from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import workload_of

__all__ = ["prepare"]


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    paths = image_files(options.file_format)
    if options.file_format == "TFRecord":
        files = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
        records = files.interleave(tf.data.TFRecordDataset, cycle_length=4)
        examples = records.repeat().map(_parse, num_parallel_calls=NUM_READERS)
    else:
        files = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths)).repeat()
        examples = files.map(_read, num_parallel_calls=NUM_READERS)
    taken = iter(examples.batch(workload.batch_size).prefetch(4))

    def run_epochs(num_epochs: int) -> float:
        for _ in range(num_epochs * workload.steps_per_epoch):
            images, _ = next(taken)
        return float(images[0, 0, 0, 0])

    return Training(run_epochs, workload.steps_per_epoch)


def _read(path: Any) -> Any:
    label = tf.strings.to_number(tf.strings.split(path, "/")[-2], tf.int32)
    return _decode(tf.io.read_file(path)), label


def _parse(record: Any) -> Any:
    label = tf.io.decode_raw(tf.strings.substr(record, 0, 4), tf.int32)[0]
    return _decode(tf.strings.substr(record, 4, -1)), label


def _decode(encoded: Any) -> Any:
    image = tf.io.decode_jpeg(encoded, channels=3)
    # The filter of Pillow, which the other sides use.
    resized = tf.image.resize(image, IMAGE_SHAPE[:2], method="bicubic", antialias=True)
    return tf.saturate_cast(tf.round(resized), tf.uint8)


if __name__ == "__main__":
    serve(prepare)
