"""Trains a recommender to a stated part of the best possible quality.

    python -m examples.recommenders dlrm
    python -m examples.recommenders two_towers --strategy hybrid
    python -m examples.recommenders drift --steps 3000

Tables are keyed by 64-bit ids, on parameter servers, or have a vocabulary, on one device. Exits
with 1 if the quality is not reached.
"""

import argparse
import sys

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
from rich.console import Console

from examples.recommenders.tables import Tables
from examples.recommenders.tasks import TASKS

STRATEGIES = {
    "one_device": lambda: sg.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
    "servers": lambda: sg.ParameterServerStrategy(num_workers=2, num_servers=2),
    "hybrid": lambda: sg.HybridStrategy(
        ["cpu:0", "cpu:1"], placement={"embeddings": "server"}, num_servers=2
    ),
}
# Steps, and the least part of the best possible quality that they reach.
EFFORTS = {
    "dlrm": (2_000, 0.94),
    "dcn": (2_000, 0.94),
    "drift": (3_000, 0.9),
    "two_towers": (1_000, 0.93),
    "sessions": (2_000, 0.85),
}
_NUM_HELD_OUT = 8_192


def main():
    options = parse_options()
    num_steps = options.steps or EFFORTS[options.model][0]
    task = TASKS[options.model]()
    kind = "keyed" if options.strategy in ("servers", "hybrid") else "vocabulary"
    tables = Tables(
        kind, options.width, eviction=task.eviction, storage_dtype=options.storage_dtype
    )
    console = Console(highlight=False)
    strategy = STRATEGIES[options.strategy]()
    with strategy.scope():
        keras.utils.set_random_seed(options.seed)
        model = task.build(tables)
    model.fit(
        task.batches(tables, options.batch_size),
        steps_per_epoch=num_steps // options.epochs,
        epochs=options.epochs,
        shuffle=False,
        verbose=1 if console.is_terminal else 2,
    )
    num_trained = num_steps * options.batch_size
    reached, best = task.quality(model, tables, _NUM_HELD_OUT, num_trained)
    console.print(f"{task.metric} {reached:.4f}, {reached / best:.1%} of the best, {best:.4f}")
    if tables.is_keyed:
        for path, table in sg.embedding.stats(strategy).items():
            size = f"{table.rows:,} rows of {table.row_bytes:.0f} bytes"
            console.print(f"{path}: {size}; {table.evicted:,} evicted")
    least = EFFORTS[options.model][1]
    if options.steps is None and reached < least * best:
        sys.exit(f"Failed: less than {least:.0%} of the best possible {task.metric}.")


def parse_options():
    parser = argparse.ArgumentParser(
        prog="python -m examples.recommenders",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", choices=TASKS, help="see examples/recommenders/tasks.py")
    parser.add_argument("--strategy", choices=STRATEGIES, default="servers")
    parser.add_argument("--steps", type=int, help="other than what the quality needs")
    parser.add_argument("--batch-size", type=int, default=1_024, help="examples of a step")
    parser.add_argument("--width", type=int, default=16, help="columns of each table")
    parser.add_argument(
        "--storage-dtype", choices=["bfloat16", "int8"], help="of keyed rows; else float32"
    )
    parser.add_argument("--epochs", type=int, default=5, help="parts of the training to report on")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
