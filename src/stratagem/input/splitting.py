"""How the examples of a batch are shared among replicas, and those of a step among workers."""

from __future__ import annotations

from stratagem.messages import explain

__all__ = ["batch_sizes_for_worker", "split_lengths"]


def split_lengths(num_examples: int, num_replicas: int) -> tuple[int, tuple[int, ...] | None]:
    """Shares examples among replicas: each takes the next ceil(B / n) until they are used up.

    Args:
        num_examples: B, at least 1.
        num_replicas: n.

    Returns:
        The per-replica size, and the true sizes in replica order, None if all are equal to it.

    Source: TF 2.21 input_lib.py and data/experimental/ops/distribute.py, _RebatchDataset.
    """
    size = -(-num_examples // num_replicas)
    if size * num_replicas == num_examples:
        return size, None
    return size, tuple(min(size, max(0, num_examples - i * size)) for i in range(num_replicas))


def batch_sizes_for_worker(
    global_batch_size: int, num_workers: int, num_replicas_per_worker: int, worker_index: int
) -> list[int]:
    """Returns how a worker that reads its own files cuts its stream, so that steps add up.

    Call anywhere. The sizes repeat without end, `num_replicas_per_worker` of them a step; in each
    step the workers together use `global_batch_size` examples.

    Args:
        global_batch_size: examples of all replicas in a step.
        num_workers: W.
        num_replicas_per_worker: R.
        worker_index: 0 <= worker_index < W.

    Returns:
        W * R sizes, no two of which differ by more than one.

    Raises:
        ValueError: a size that is not positive, or an index out of range.

    Example:
        >>> sg.input.batch_sizes_for_worker(7, 2, 2, worker_index=1)
        [2, 1, 2, 2]

    Source: TF 2.21 data/experimental/ops/distribute.py, batch_sizes_for_worker.
    """
    sizes = {
        "global_batch_size": global_batch_size,
        "num_workers": num_workers,
        "num_replicas_per_worker": num_replicas_per_worker,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(
                explain(f"{name}={value}.", expected="1 or more.", fix="pass a positive number.")
            )
    if not 0 <= worker_index < num_workers:
        raise ValueError(
            explain(
                f"worker_index={worker_index} names none of {num_workers} workers.",
                expected=f"0 <= worker_index < {num_workers}.",
                fix="count workers from 0.",
            )
        )
    num_parts = num_workers * num_replicas_per_worker
    smaller, num_larger = divmod(global_batch_size, num_parts)
    parts = [smaller + 1] * num_larger + [smaller] * (num_parts - num_larger)
    start = worker_index * num_replicas_per_worker
    return parts[start:] + parts[:start]
