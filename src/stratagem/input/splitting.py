"""Sizes of per-replica parts of a batch, and of per-step parts of a worker's stream."""

from __future__ import annotations

from stratagem.messages import explain


def split_lengths(num_examples: int, num_replicas: int) -> tuple[int, tuple[int, ...] | None]:
    """Splits B examples over n replicas: each takes ceil(B / n) until none are left.

    Returns the per-replica size and the true lengths by replica, or None if all equal the size.
    Source: TF 2.21 input_lib.py and data/experimental/ops/distribute.py, _RebatchDataset.
    """
    size = -(-num_examples // num_replicas)
    if size * num_replicas == num_examples:
        return size, None
    return size, tuple(min(size, max(0, num_examples - i * size)) for i in range(num_replicas))


def batch_sizes_for_worker(
    global_batch_size: int, num_workers: int, num_replicas_per_worker: int, worker_index: int
) -> list[int]:
    """Returns the sizes into which a worker that reads its own files cuts its stream.

    The sizes repeat forever, `num_replicas_per_worker` of them per step. In each step, all workers
    together use `global_batch_size` examples.

    Args:
        global_batch_size: examples of all replicas per step.
        num_workers: W.
        num_replicas_per_worker: R.
        worker_index: 0 <= worker_index < W.

    Returns:
        W * R sizes that differ by at most one.

    Raises:
        ValueError: a size that is not positive, or an index out of range.

    Example:
        >>> sg.input.batch_sizes_for_worker(7, 2, 2, worker_index=1)
        [2, 1, 2, 2]

    Source: TF 2.21 data/experimental/ops/distribute.py, batch_sizes_for_worker.
    """
    _check_positive(
        global_batch_size=global_batch_size,
        num_workers=num_workers,
        num_replicas_per_worker=num_replicas_per_worker,
    )
    if not 0 <= worker_index < num_workers:
        raise ValueError(
            explain(
                f"worker_index={worker_index} is out of range for {num_workers} workers.",
                expected=f"0 <= worker_index < {num_workers}.",
                fix="count workers from 0.",
            )
        )
    num_parts = num_workers * num_replicas_per_worker
    smaller, num_larger = divmod(global_batch_size, num_parts)
    parts = [smaller + 1] * num_larger + [smaller] * (num_parts - num_larger)
    start = worker_index * num_replicas_per_worker
    return parts[start:] + parts[:start]


def _check_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(
                explain(
                    f"{name}={value} is out of range.",
                    expected="1 or more.",
                    fix=f"pass a positive {name}.",
                )
            )
