"""Peer: one worker or parameter server of a cluster of TensorFlow, until stdin ends."""

from __future__ import annotations

import json
import os
import sys

import tensorflow as tf

__all__ = ["main"]


def main() -> None:
    """Serves the task that the arguments say."""
    cluster, job_name, task_index = json.loads(sys.argv[1])
    config = tf.compat.v1.ConfigProto()
    num_workers = len(cluster["worker"])
    if (os.cpu_count() or 1) < num_workers + 1:  # TensorFlow's guide of parameter servers says so
        config.inter_op_parallelism_threads = num_workers + 1
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster),
        job_name=job_name,
        task_index=task_index,
        config=config,
        protocol="grpc",
    )
    sys.stdin.read()
    assert server
    os._exit(0)  # what serves has threads of its own, which nobody can end


if __name__ == "__main__":
    main()
