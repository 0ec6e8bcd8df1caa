"""Wishes of a consumer for a job, checked."""

from __future__ import annotations

import dataclasses

from stratagem.input.service.sharding import ShardingPolicy, checked_policy
from stratagem.input.service.shared_window import CrossTrainerCache
from stratagem.messages import explain


@dataclasses.dataclass(frozen=True)
class JobRequest:
    """Wishes of a consumer for a job.

    Args:
        policy: number of the `ShardingPolicy`.
        job: name of the job; None for one of this consumer alone.
        consumer_index: index of the consumer in coordinated reads.
        num_consumers: number of consumers in coordinated reads.
        most_ahead: number of batches that are fetched ahead; None for the default.
        is_exact: each batch must be visited exactly once.
        skip_errors: number of batches that may be skipped because they cannot be read.
        dataset_id: the registered dataset.
        trainer: name of the trainer that shares a window with others; None without.
    """

    policy: int
    job: str | None
    consumer_index: int | None
    num_consumers: int | None
    most_ahead: int | None
    is_exact: bool
    skip_errors: int = 0
    dataset_id: str = ""
    trainer: str | None = None

    @classmethod
    def checked(
        cls,
        processing_mode: object,
        job: str | None,
        consumer_index: int | None,
        num_consumers: int | None,
        most_ahead: int | None,
        is_exact: bool,
        skip_errors: int = 0,
        cache: CrossTrainerCache | None = None,
    ) -> JobRequest:
        """Returns the request of these options; raises ValueError if they do not fit."""
        policy = checked_policy(processing_mode)
        _check_consumers(job, consumer_index, num_consumers)
        if most_ahead is not None and most_ahead < 1:
            raise ValueError(
                explain(
                    f"max_outstanding_requests={most_ahead} is out of range.",
                    expected="1 or more batches.",
                    fix="omit it for 2 batches per worker.",
                )
            )
        if is_exact and policy is ShardingPolicy.OFF and num_consumers is None:
            raise ValueError(
                explain(
                    "exactly_once=True was passed with ShardingPolicy.OFF, with which each worker "
                    "reads all data.",
                    expected="a policy that divides the data.",
                    fix='pass "distributed_epoch" (DYNAMIC).',
                )
            )
        if skip_errors < 0 or (skip_errors and num_consumers is not None):
            raise ValueError(
                explain(
                    f"skip_errors={skip_errors} was passed with num_consumers={num_consumers}.",
                    expected="0 or more, and 0 in coordinated reads: consumers would lose step.",
                    fix="omit skip_errors or num_consumers.",
                )
            )
        if cache is not None:
            _check_cache(job, num_consumers, is_exact=is_exact)
        trainer = None if cache is None else cache.trainer_id
        consumer = job, consumer_index, num_consumers
        return cls(int(policy), *consumer, most_ahead, is_exact, skip_errors, trainer=trainer)


def _check_cache(job: str | None, num_consumers: int | None, *, is_exact: bool) -> None:
    if not job or num_consumers is not None or is_exact:
        raise ValueError(
            explain(
                f"CrossTrainerCache was passed with job_name={job!r}, "
                f"num_consumers={num_consumers} and exactly_once={is_exact}.",
                expected="job_name, and neither coordinated reads nor exactly_once: a trainer that "
                "falls behind misses batches.",
                fix="pass job_name, and omit the others.",
            )
        )


def _check_consumers(
    job: str | None, consumer_index: int | None, num_consumers: int | None
) -> None:
    if job == "":
        raise ValueError(
            explain(
                "job_name is empty.",
                expected="a name that the consumers of the job share, or None.",
                fix="omit job_name for a job of this process alone.",
            )
        )
    if (consumer_index is None) != (num_consumers is None) or (num_consumers and not job):
        raise ValueError(
            explain(
                f"distribute received job_name={job!r}, consumer_index={consumer_index} and "
                f"num_consumers={num_consumers}.",
                expected="consumer_index and num_consumers together, with job_name.",
                fix="pass all three for coordinated reads, or none of consumer_index and "
                "num_consumers.",
            )
        )
    if num_consumers is not None and not 0 <= (consumer_index or 0) < num_consumers:
        raise ValueError(
            explain(
                f"consumer_index={consumer_index} is out of range for {num_consumers} consumers.",
                expected="0 <= consumer_index < num_consumers.",
                fix="pass the index of this process among the consumers.",
            )
        )
