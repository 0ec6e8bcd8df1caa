"""Detection of Kubernetes, Slurm and Google Cloud, and the time they leave after a notice."""

from __future__ import annotations

import time
from collections.abc import Callable

from stratagem import environment
from stratagem.cluster.preemption.google_cloud import on_google_cloud
from stratagem.messages import explain


def name_of_environment() -> str | None:
    """Returns the name of the environment that gives notice to this process.

    A scheduler takes precedence over the cloud that provides its machines.

    Returns:
        `"Kubernetes"`, `"Slurm"` or `"Google Cloud"`; None elsewhere.

    Example:
        >>> from unittest import mock
        >>> pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        >>> with mock.patch.dict("os.environ", pod):  # Kubernetes sets it in each pod
        ...     sg.preemption.name_of_environment()
        'Kubernetes'

    Source: specific to Stratagem.
    """
    if environment.lookup("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    if environment.lookup("SLURM_JOB_ID"):
        return "Slurm"
    return "Google Cloud" if on_google_cloud() else None


def pod_time_left(grace_s: float | None = None) -> Callable[[], float]:
    """Returns a function that gives the time a pod has after SIGTERM.

    Args:
        grace_s: the pod's `terminationGracePeriodSeconds`, which a pod cannot read itself; None for
            `STRATAGEM_POD_GRACE_S`, which defaults to Kubernetes's 30.

    Returns:
        A function without arguments that returns seconds.

    Raises:
        ValueError: the time is not above 0.

    Example:
        >>> sg.preemption.pod_time_left(120)()
        120.0

    Source: Kubernetes, page "Pod Lifecycle", terminationGracePeriodSeconds.
    """
    time_left_s = environment.read("pod_grace_s") if grace_s is None else float(grace_s)
    if not 0 < time_left_s < float("inf"):
        raise ValueError(
            explain(
                f"A pod's grace_s={grace_s!r} is out of range.",
                expected="a number of seconds above 0: its terminationGracePeriodSeconds.",
                fix="pass that value, or omit grace_s if you don't know it.",
            )
        )
    return lambda: time_left_s


def slurm_time_left() -> Callable[[], float] | None:
    """Returns a function that gives the time until the time limit of a Slurm job.

    A preempted or canceled job has less time, but Slurm does not report how much.

    Returns:
        A function without arguments that returns seconds; None if `SLURM_JOB_END_TIME` is not set,
        as in older versions of Slurm.

    Raises:
        ValueError: the variable is not a time.

    Example:
        >>> import time
        >>> from unittest import mock
        >>> job = {"SLURM_JOB_END_TIME": str(int(time.time()) + 3600)}
        >>> with mock.patch.dict("os.environ", job):  # Slurm sets it
        ...     time_left = sg.preemption.slurm_time_left()
        >>> 3500 < time_left() <= 3600
        True

    Source: Slurm, page "sbatch", SLURM_JOB_END_TIME.
    """
    text = environment.lookup("SLURM_JOB_END_TIME")
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(
            explain(
                f"SLURM_JOB_END_TIME={text!r} is not a time.",
                expected="whole seconds since 1970, as Slurm sets it.",
                fix="unset the variable.",
            )
        )
    ends_at_s = int(text)
    return lambda: max(0.0, ends_at_s - time.time())
