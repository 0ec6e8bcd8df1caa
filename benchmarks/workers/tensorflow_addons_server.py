"""Peer: a server of TensorFlow that has the ops of its recommenders-addons, until stdin ends."""

from __future__ import annotations

import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import tensorflow_recommenders_addons  # noqa: F401 - registers its ops

from benchmarks.workers.tensorflow_server import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
