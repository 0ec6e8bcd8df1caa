"""A cluster of servers, as seen from a machine that is no member of it."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from stratagem import environment
from stratagem.cluster import ClusterDef, ClusterResolver, ClusterSpec, task_count
from stratagem.cluster.addresses import join_address, split_address
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.launch.restart.signals import CaughtSignals
from stratagem.launch.scripts import RemoteError
from stratagem.messages import explain
from stratagem.remote.jobs.job_log import Ended, follow
from stratagem.remote.jobs.job_output import JobOutput
from stratagem.remote.jobs.job_plan import JOB_VARIABLE, JobPlan, answer_key
from stratagem.remote.jobs.jobs_client import Jobs
from stratagem.remote.jobs.lease import Lease
from stratagem.remote.jobs.local_code import Package, local_modules, pack
from stratagem.remote.jobs.log_frames import verified
from stratagem.remote.jobs.pickling import CALL, dump, find_culprit, load_pickled, outside_of
from stratagem.remote.ray.leader import leader_of, tasks_of
from stratagem.remote.ray.ray_nodes import resource_of_task

__all__ = ["RemoteArguments", "RemoteCluster"]

_POLL_S = 0.5
# The end of a job is known to Ray a little later than to its client.
_TELL_S = 5.0
# Under which name a job keeps who has sent it.
_CLIENT = "stratagem_client"
# Beside what SIGTERM lets a program do; Ray itself gives it 3 s.
_STOP_S = "10"
_FUNCTION = ("-m", "stratagem.remote.jobs.function_program", "{answer}")


class RemoteArguments(TypedDict, total=False):
    """The keyword arguments of `RemoteCluster`."""

    jobs_port: int | None
    excludes: Sequence[str]
    stop_with_client: bool
    client_timeout_s: float | None
    join_timeout_s: float | None


class RemoteCluster:
    """Runs programs on a cluster of servers: what it needs of this machine is sent.

    A cluster with `ps` tasks runs a program once, as the coordinator; one without, as each of its
    chief and workers; one of Ray's own, given by its URL, once on its head.

    Args:
        cluster: the tasks that run `stratagem server`, as a `ClusterSpec`, a dict, a `ClusterDef`
            or a resolver; or the URL at which the head of a Ray cluster takes jobs.
        jobs_port: of the leader; None for `STRATAGEM_JOBS_PORT`.
        excludes: patterns of files that are not sent, such as "*.csv" or "data/raw".
        stop_with_client: whether a job ends when this process does.
        client_timeout_s: how long it goes on without a sign of this process; None for
            `STRATAGEM_CLIENT_TIMEOUT_S`.
        join_timeout_s: how long to wait for servers that are missing; None for
            `STRATAGEM_JOIN_TIMEOUT_S`.

    Raises:
        TypeError: no cluster. ValueError: a cluster without tasks.

    Example::

        cluster = sg.remote.RemoteCluster({"chief": ["a:2222"], "ps": ["b:2222"], ...})
        accuracy = cluster.run(train, kwargs={"epochs": 3})
    """

    def __init__(
        self,
        cluster: Mapping[str, Any] | ClusterDef | ClusterSpec | ClusterResolver | str,
        *,
        jobs_port: int | None = None,
        excludes: Sequence[str] = (),
        stop_with_client: bool = True,
        client_timeout_s: float | None = None,
        join_timeout_s: float | None = None,
    ) -> None:
        self._spec: ClusterSpec | None = None
        if isinstance(cluster, str):
            self._jobs = Jobs(cluster if "://" in cluster else f"http://{cluster}")
        else:
            self._spec = _spec_of(cluster)
            port = jobs_port or int(environment.read("jobs_port"))
            host, _ = split_address(self._spec.task_address(*leader_of(self._spec)))
            self._jobs = Jobs(f"http://{join_address(host, port)}")
        self._excludes = tuple(excludes)
        self._lease_s: float | None = None
        if stop_with_client:
            limit_s = client_timeout_s or environment.read("client_timeout_s")
            self._lease_s = float(limit_s)
        self._join_timeout_s = float(join_timeout_s or environment.read("join_timeout_s"))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        answer_of: tuple[str, int] | None = None,
    ) -> Any:
        """Calls a function on the cluster; what it prints appears here.

        The function, what it refers to, and the modules of this machine that are loaded are sent.

        Args:
            fn: the function.
            args: its arguments.
            kwargs: its keyword arguments.
            answer_of: type and index of the task whose result to return, where several call it;
                None for the first.

        Returns:
            What it returns.

        Raises:
            Exception: what it raises; the cause holds the traceback there.
            TypeError: something that cannot be sent, there or back.
            RuntimeError: it did not end by an exception.
            ValueError: the modules are larger than `STRATAGEM_UPLOAD_LIMIT_BYTES`, or no such task
                calls it.
            DeadlineExceededError: servers are missing.
            UnavailableError: the cluster was lost. PermissionError: it wants another token.
        """
        self._check_task(answer_of)
        call = _pickled(fn, args, dict(kwargs or {}))
        package = pack(None, local_modules(), more={CALL: call}, excludes=self._excludes)
        python = ".".join(map(str, sys.version_info[:2]))
        plan = dataclasses.replace(self._plan(_FUNCTION), python=python, answers=answer_of)
        ended, nonce = self._run(package, plan)
        if not ended.answer:
            raise RuntimeError(
                explain(
                    f"{fn!r} has not come to its end on the cluster: exit code {ended.code}. "
                    f"{ended.notes}",
                    expected="a function that returns or raises.",
                    fix="look at what it has printed last.",
                )
            )
        value, error, lines = load_pickled(verified(ended.answer, answer_key(nonce)))
        if lines:
            remote = RemoteError(*lines)
            raise (error or _unsendable_error(fn, lines)) from remote
        return value

    def run_script(
        self, script: str | Path, args: Sequence[str] = (), *, module: str | None = None
    ) -> int:
        """Runs a script on the cluster, with its folder; what it prints appears here.

        Args:
            script: a Python file.
            args: its arguments.
            module: its name, where it is to run as `python -m` does.

        Returns:
            Its exit code; negative where a signal has ended it.

        Raises:
            ValueError: the files are larger than `STRATAGEM_UPLOAD_LIMIT_BYTES`.
            DeadlineExceededError: servers are missing.
            UnavailableError: the cluster was lost. PermissionError: it wants another token.
        """
        path = Path(script).resolve()
        folder = path.parents[module.count(".")] if module else path.parent
        command = ("-m", module, *args) if module else (path.name, *args)
        package = pack(folder, local_modules(), excludes=self._excludes)
        return self._run(package, self._plan(command))[0].code

    def _check_task(self, task: tuple[str, int] | None) -> None:
        known = self._plan(()).tasks
        if task is not None and task not in known:
            raise ValueError(
                explain(
                    f"answer_of={task!r} is none of the tasks that call the function: {known}.",
                    expected="type and index of one of them, or None.",
                    fix="leave answer_of out.",
                )
            )

    def _run(self, package: Package, plan: JobPlan) -> tuple[Ended, str]:
        self._wait_for_servers()
        if not self._jobs.has_package(package.name):
            self._jobs.upload(package.name, package.content)
        if self._spec is not None:
            self._wait_for_turn()
        # What ends this process must not leave the job behind that ends with it.
        with CaughtSignals() as caught, contextlib.ExitStack() as stack:
            if plan.lease_s is not None:
                stack.enter_context(Lease(self._jobs, plan.nonce, plan.lease_s))
            job = self._jobs.submit(
                f"python3 -m stratagem.remote.jobs.job {shlex.quote(plan.to_json())}",
                {
                    "working_dir": f"gcs://{package.name}",
                    "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": _STOP_S, JOB_VARIABLE: plan.nonce},
                },
                **{_CLIENT: f"{getpass.getuser()} at {socket.gethostname()}"},
            )
            with self._stopped_at_the_end(job):
                output = JobOutput([f"{kind} {index}" for kind, index in plan.tasks])
                ended = follow(
                    self._jobs, job, plan.nonce, output, lambda: caught.ending is not None
                )
                if ended is not None:
                    return ended, plan.nonce
                self._stop(job)
        assert caught.ending is not None
        signal.raise_signal(caught.ending)
        sys.exit(128 + caught.ending)

    def _plan(self, command: Sequence[str]) -> JobPlan:
        nonce = secrets.token_hex(16)
        spec = self._spec
        if spec is None:
            return JobPlan(nonce=nonce, command=tuple(command), lease_s=self._lease_s)
        leader = leader_of(spec)
        trains = [] if task_count(spec, "ps") else [t for t in tasks_of(spec) if t[0] != "ps"]
        return JobPlan(
            nonce=nonce,
            command=tuple(command),
            cluster=spec.as_dict(),
            tasks=tuple(trains),
            head=spec.task_address(*leader),
            url=self._jobs.url,
            lease_s=self._lease_s,
        )

    @contextlib.contextmanager
    def _stopped_at_the_end(self, job: str) -> Generator[None]:
        """Stops a job that this process does not follow to its end."""
        try:
            yield
        except BaseException:
            self._stop(job)
            raise

    def _stop(self, job: str) -> None:
        if self._lease_s is not None:
            with contextlib.suppress(UnavailableError):
                self._jobs.stop(job)

    def _wait_for_turn(self) -> None:
        """Waits for the jobs of other clients: servers and workers have one place each."""
        deadline_s = time.monotonic() + self._join_timeout_s
        told: set[str] = set()
        while others := {
            job: metadata[_CLIENT]
            for job, metadata in self._jobs.running().items()
            if _CLIENT in metadata
        }:
            named = ", ".join(f"{job} of {client}" for job, client in others.items())
            if time.monotonic() > deadline_s:
                raise DeadlineExceededError(
                    explain(
                        f"The cluster at {self._jobs.url} is still busy after "
                        f"{self._join_timeout_s:g} s: {named}.",
                        expected="a cluster that runs one program at a time.",
                        fix="wait, or end that one; STRATAGEM_JOIN_TIMEOUT_S changes the limit.",
                    )
                )
            if not told and time.monotonic() > deadline_s - self._join_timeout_s + _TELL_S:
                print(f"Waiting for {named}.", file=sys.stderr, flush=True)
                told |= others.keys()
            threading.Event().wait(_POLL_S)

    def _wait_for_servers(self) -> None:
        deadline_s = time.monotonic() + self._join_timeout_s
        while True:
            try:
                missing = self._missing()
            except UnavailableError as error:
                if time.monotonic() > deadline_s:
                    # Of that error only what has happened: this one says what to do.
                    raise self._too_late("its leader", str(error).splitlines()[0]) from error
            else:
                if not missing:
                    return
                if time.monotonic() > deadline_s:
                    raise self._too_late(", ".join(missing), "the leader is there")
            threading.Event().wait(_POLL_S)

    def _missing(self) -> list[str]:
        """The tasks of which no server has joined."""
        if self._spec is None:
            self._jobs.version()
            return []
        there = {name for machine in self._jobs.resources() for name in machine}
        return [
            f"{kind} {index} ({self._spec.task_address(kind, index)})"
            for kind, index in tasks_of(self._spec)
            if resource_of_task(kind, index) not in there
        ]

    def _too_late(self, missing: str, details: str) -> DeadlineExceededError:
        return DeadlineExceededError(
            explain(
                f"Of the cluster at {self._jobs.url} these are missing after "
                f"{self._join_timeout_s:g} s: {missing}. {details}",
                expected="`stratagem server` on each machine, with the same RAY_AUTH_TOKEN.",
                fix="start those that are missing; STRATAGEM_JOIN_TIMEOUT_S changes the limit.",
            )
        )


def _spec_of(cluster: Any) -> ClusterSpec:
    if isinstance(cluster, ClusterResolver):
        cluster = cluster.cluster_spec()
    if not isinstance(cluster, Mapping | ClusterDef | ClusterSpec):
        raise TypeError(
            explain(
                f"cluster={cluster!r} is of type {type(cluster).__name__}.",
                expected="a ClusterSpec, a dict, a ClusterDef, a resolver, or the URL of a Ray "
                "cluster.",
                fix='pass {"chief": ["host0:2222"], "worker": ["host1:2222"]}, for example.',
            )
        )
    return ClusterSpec(cluster)


def _pickled(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    if not callable(fn):
        raise TypeError(
            explain(
                f"fn={fn!r} is of type {type(fn).__name__}.",
                expected="a function.",
                fix="pass the function itself and its arguments apart: run(train, (3,)).",
            )
        )
    try:
        return dump((fn, tuple(args), kwargs))
    except Exception as error:
        raise TypeError(
            explain(
                f"{_culprit(fn, args, kwargs)} cannot be sent to the cluster: {error}",
                expected="a function that refers to what can be pickled.",
                fix="make it in the function, where that runs.",
            )
        ) from error


def _culprit(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Names what of a call cannot be pickled."""
    parts = {f"Argument {place}": value for place, value in enumerate(args)}
    parts |= {f"Argument {name!r}": value for name, value in kwargs.items()}
    found = find_culprit(parts | outside_of(fn))
    return f"{fn!r}" if found is None else f"{found[0]} of {fn!r}, {found[1]!r},"


def _unsendable_error(fn: Callable[..., Any], lines: Sequence[str]) -> RuntimeError:
    return RuntimeError(
        explain(
            f"{fn!r} has raised what cannot be sent here: {lines[-1]}",
            expected="an exception that can be pickled.",
            fix="look at its traceback, which is the cause of this error.",
        )
    )
