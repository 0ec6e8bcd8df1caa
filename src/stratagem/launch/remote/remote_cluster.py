"""`RemoteCluster`: sends functions and scripts to a cluster of servers."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import io
import json
import logging
import platform
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from stratagem import environment, logs, settings
from stratagem.cluster.addresses import join_address, split_address
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.roles import task_count
from stratagem.cluster.spec import EXAMPLE, ClusterDef, ClusterSpec
from stratagem.errors import DeadlineExceededError, UnavailableError, check_type, explain, invalid
from stratagem.launch.functions import RemoteError, dumps, require_callable, unsendable
from stratagem.launch.remote.jobs_client import (
    HEARTBEATS_PER_LIMIT,
    JobOutput,
    JobResult,
    JobsClient,
    Lease,
    follow,
    local_modules,
    pack,
)
from stratagem.launch.remote.protocol import (
    ANSWER,
    JOB_VARIABLE,
    JobPlan,
    answer_key,
    verified,
)
from stratagem.launch.remote.ray_nodes import leader_of, resource_of_task, tasks_of
from stratagem.launch.restart.report import CaughtSignals
from stratagem.launch.tasks.exit_status import exit_code
from stratagem.launch.tasks.function_task import CALL, PROGRAM, pack_call, read_result

_logger = logging.getLogger(__name__)

_POLL_S = 0.5
# Ray notices the end of a job a little later than its client.
_REPORT_WAIT_AFTER_S = 5.0
# Metadata of a job: user and host of its client.
_CLIENT = "stratagem_client"
# Seconds for a program to end after SIGTERM; Ray's default is 3.
_STOP_S = "10"
_FUNCTION = ("-c", PROGRAM, ".", ANSWER)


class RemoteArguments(TypedDict, total=False):
    """The keyword arguments of `RemoteCluster`."""

    jobs_port: int | None
    excludes: Sequence[str]
    stop_with_client: bool
    client_timeout_s: float | None
    join_timeout_s: float | None


class RemoteCluster:
    """Runs functions and scripts of this machine on a cluster of servers.

    A cluster with `ps` tasks runs a program once, as the coordinator; a cluster without, as its
    chief and each of its workers; a plain Ray cluster, given by its URL, once on its head.

    Args:
        cluster: the tasks that run `stratagem server`, as a `ClusterSpec`, a dict, a `ClusterDef`
            or a resolver; or the URL at which the head of a Ray cluster accepts jobs.
        jobs_port: port of the leader for jobs; None for `STRATAGEM_JOBS_PORT`.
        excludes: patterns of files that are not sent, such as "*.csv" or "data/raw".
        stop_with_client: True to end a job when this process ends.
        client_timeout_s: seconds that a job continues without contact to this process; None for
            `STRATAGEM_CLIENT_TIMEOUT_S`.
        join_timeout_s: seconds to wait for missing servers; None for `STRATAGEM_JOIN_TIMEOUT_S`.

    Raises:
        TypeError: the cluster has the wrong type.
        ValueError: the cluster has no tasks, or `client_timeout_s` is not positive.

    Example:
        >>> cluster = sg.remote.RemoteCluster(
        ...     {"worker": ["localhost:2222"]}, jobs_port=1, join_timeout_s=0)
        >>> try:
        ...     cluster.run(pow, (2, 10))  # 1024, once `stratagem server` runs there
        ... except sg.errors.DeadlineExceededError as error:
        ...     print(str(error).split(" after")[0])
        The cluster at http://localhost:1 is incomplete

    Source: specific to Stratagem.
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
            self._jobs = JobsClient(cluster if "://" in cluster else f"http://{cluster}")
        else:
            self._spec = _spec_of(cluster)
            port = int(_number(jobs_port, "jobs_port"))
            host, _ = split_address(self._spec.task_address(*leader_of(self._spec)))
            self._jobs = JobsClient(f"http://{join_address(host, port)}")
        self._excludes = tuple(excludes)
        self._lease_s: float | None = None
        if stop_with_client:
            self._lease_s = _number(client_timeout_s, "client_timeout_s")
            if self._lease_s <= 0:
                raise invalid(
                    f"client_timeout_s={client_timeout_s!r} ends every job at once.",
                    expected="a number of seconds above 0.",
                    fix="pass one, or stop_with_client=False for jobs that continue.",
                )
        self._join_timeout_s = _number(join_timeout_s, "join_timeout_s")

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        answer_of: tuple[str, int] | None = None,
    ) -> Any:
        """Calls a function on the cluster and returns its value. Output appears here.

        The function, the variables it captures, and the loaded modules of this machine are sent.

        Args:
            fn: the function.
            args: its arguments.
            kwargs: its keyword arguments.
            answer_of: type and index of the task whose value is returned, if several tasks call the
                function; None for the first.

        Returns:
            The value that the function returns.

        Raises:
            Exception: raised by the function; the cause has its traceback on the cluster.
            TypeError: the call or the value cannot be pickled.
            RuntimeError: the function neither returned nor raised an exception.
            ValueError: the modules are too large, or `answer_of` does not call the function.
            DeadlineExceededError: servers are missing.
            UnavailableError: the connection to the cluster was lost.
            PermissionError: the cluster has another token.
        """
        plan = self._plan(_FUNCTION)
        if answer_of is not None and answer_of not in plan.tasks:
            raise invalid(
                f"answer_of={answer_of!r} is not a task that calls the function: {plan.tasks}.",
                expected="type and index of one of these tasks, or None.",
                fix="omit answer_of, or pass one of these tasks.",
            )
        call = _pickled(fn, args, dict(kwargs or {}))
        package = pack(None, local_modules(), more={CALL: call}, excludes=self._excludes)
        python = ".".join(map(str, sys.version_info[:2]))
        plan = dataclasses.replace(plan, python=python, answers=answer_of)
        job = self._run(package, plan)
        if not job.answer:
            raise RuntimeError(
                explain(
                    f"{fn!r} did not finish on the cluster: exit code {job.code}. {job.notes}",
                    expected="a function that returns or raises.",
                    fix="read its last output.",
                )
            )
        result = read_result(io.BytesIO(verified(job.answer, answer_key(plan.nonce))))
        if result.traceback:
            error = result.error or RuntimeError(
                explain(
                    f"{fn!r} raised an exception that cannot be sent back: {result.traceback[-1]}",
                    expected="an exception that can be pickled.",
                    fix="read its traceback, which is the cause of this error.",
                )
            )
            raise error from RemoteError(*result.traceback)
        return result.value

    def run_script(
        self, script: str | Path, args: Sequence[str] = (), *, module: str | None = None
    ) -> int:
        """Sends a script with its folder and runs it on the cluster. Output appears here.

        Args:
            script: a Python file.
            args: arguments of the script.
            module: name of the script as a module, to run it as `python -m` does; None to run it as
                a file.

        Returns:
            The exit code; negative for a signal.

        Raises:
            ValueError: the files are larger than `STRATAGEM_UPLOAD_LIMIT_BYTES`.
            DeadlineExceededError: servers are missing.
            UnavailableError: the connection to the cluster was lost.
            PermissionError: the cluster has another token.
        """
        path = Path(script).resolve()
        folder = path.parents[module.count(".")] if module else path.parent
        command = ("-m", module, *args) if module else (path.name, *args)
        package = pack(folder, local_modules(), excludes=self._excludes)
        return self._run(package, self._plan(command)).code

    def _run(self, package: bytes, plan: JobPlan) -> JobResult:
        self._wait_until_ready()
        # If this process exits, cancel the job it started.
        with CaughtSignals() as caught, contextlib.ExitStack() as stack:
            text = json.dumps(dataclasses.asdict(plan))
            job = self._jobs.submit(
                f"python3 -m stratagem.launch.remote.job {shlex.quote(text)}",
                package,
                {"RAY_JOB_STOP_WAIT_TIME_S": _STOP_S, JOB_VARIABLE: plan.nonce},
                **{_CLIENT: f"{getpass.getuser()} at {platform.node()}"},
            )
            result: JobResult | None = None

            def begin_lease() -> None:
                if plan.lease_s is not None:
                    stack.enter_context(Lease(self._jobs, plan.nonce, plan.lease_s))

            try:
                output = JobOutput([f"{kind} {index}" for kind, index in plan.tasks])
                result = follow(
                    self._jobs,
                    job,
                    plan.nonce,
                    output,
                    should_leave=lambda: caught.ending is not None,
                    on_heard=begin_lease,
                )
                if result is not None:
                    return result
            finally:  # also if it is left, by an error or a signal
                if result is None and plan.lease_s is not None:
                    with contextlib.suppress(UnavailableError):
                        self._jobs.stop(job)
        assert caught.ending is not None
        signal.raise_signal(caught.ending)
        sys.exit(128 + caught.ending)

    def _plan(self, command: Sequence[str]) -> JobPlan:
        plan = JobPlan(
            nonce=secrets.token_hex(16),
            command=tuple(command),
            lease_s=self._lease_s,
            heartbeat_s=float(settings.read("peer_timeout_s")) / HEARTBEATS_PER_LIMIT,
        )
        spec = self._spec
        if spec is None:
            return plan
        trains = [] if task_count(spec, "ps") else [t for t in tasks_of(spec) if t[0] != "ps"]
        return dataclasses.replace(
            plan,
            cluster=spec.as_dict(),
            tasks=tuple(trains),
            head=spec.task_address(*leader_of(spec)),
            url=self._jobs.url,
        )

    def _wait_until_ready(self) -> None:
        """Waits for missing servers, and for jobs of others: a cluster runs one at a time."""
        started_s, has_reported = time.monotonic(), False
        while (obstacle := self._obstacle()) is not None:
            named, error = obstacle
            waited_s = time.monotonic() - started_s
            if waited_s > self._join_timeout_s:
                raise error
            if waited_s > _REPORT_WAIT_AFTER_S and not has_reported:
                logs.announce(_logger, f"Waiting for {named}.")
                has_reported = True
            threading.Event().wait(_POLL_S)

    def _obstacle(self) -> tuple[str, DeadlineExceededError] | None:
        """Returns whom a program has to wait for, and the error of who waits too long."""
        spec, leader = self._spec, "The leader has started."
        after = f"after {self._join_timeout_s:g} s"
        try:
            self._jobs.connect()
            if spec is None:
                return None
            joined = {name for machine in self._jobs.machines() for name in machine}
            missing = [
                f"{kind} {index} ({spec.task_address(kind, index)})"
                for kind, index in tasks_of(spec)
                if resource_of_task(kind, index) not in joined
            ]
            jobs = {} if missing else self._jobs.running()
        except UnavailableError as error:
            # Only the first sentence of that error: the one below has its own fix.
            missing, leader, jobs = ["its leader"], str(error).splitlines()[0], {}
        if missing:
            named = ", ".join(missing)
            what = f"is incomplete {after}; missing: {named}. {leader}"
            expected = "`stratagem server` on each machine, with the same RAY_AUTH_TOKEN."
            fix = "start the missing servers"
        elif others := [f"{job} of {of[_CLIENT]}" for job, of in jobs.items() if _CLIENT in of]:
            named = ", ".join(others)
            what = f"is still busy {after}: {named}."
            expected, fix = "a cluster that runs one program at a time.", "wait, or stop that job"
        else:
            return None
        return named, DeadlineExceededError(
            explain(
                f"The cluster at {self._jobs.url} {what}",
                expected=expected,
                fix=f"{fix}; STRATAGEM_JOIN_TIMEOUT_S changes the limit.",
                code="SG514",
            )
        )


def _number(value: float | None, setting: str) -> float:
    return float(settings.read(setting) if value is None else value)


def _spec_of(cluster: Any) -> ClusterSpec:
    if isinstance(cluster, ClusterResolver):
        cluster = cluster.cluster_spec()
    wanted = "a ClusterSpec, a dict, a ClusterDef, a resolver, or the URL of a Ray cluster"
    fix = f"pass {EXAMPLE}, for example."
    check_type("cluster", cluster, Mapping | ClusterDef | ClusterSpec, wanted, fix)
    return ClusterSpec(cluster)


def _pickled(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    require_callable(fn, "run(train, (3,))")
    call = (fn, tuple(args), dict(kwargs))
    try:
        return pack_call(dumps(call), by_value=True)
    except Exception as error:
        raise unsendable(*call, error, where="the cluster", pickled=dumps) from error


# `connect_to_cluster`: moves the running script to a cluster of servers.


def connect_to_cluster(
    cluster_spec_or_resolver: Mapping[str, Any] | ClusterDef | ClusterSpec | ClusterResolver | str,
    job_name: str = "localhost",
    task_index: int = 0,
    protocol: str | None = None,
    make_master_device_default: bool = True,
    cluster_device_filters: None = None,
    **options: Unpack[RemoteArguments],
) -> None:
    """Runs this script on a cluster of servers from its beginning, then exits this process.

    On the cluster this call returns at once. With parameter servers the script runs once, as the
    coordinator; otherwise as each of the tasks, in lockstep. The folder of the script and the
    loaded modules are sent. Output appears here. Call it after the imports.

    Args:
        cluster_spec_or_resolver: the tasks that run `stratagem server`, or the URL at which the
            head of a Ray cluster accepts jobs.
        job_name: must be "localhost": this program is not a member of the cluster.
        task_index: must be 0.
        protocol: None or "grpc", for compatibility.
        make_master_device_default: ignored, for compatibility.
        cluster_device_filters: None, for compatibility.
        **options: keyword arguments of `RemoteCluster`.

    Raises:
        SystemExit: the program ended on the cluster; with its exit code.
        RuntimeError: this is an interactive session without a script.
        TypeError: the cluster has the wrong type.
        ValueError: an unsupported value, a cluster without tasks, or too large a folder.
        DeadlineExceededError: servers are missing.
        UnavailableError: the connection to the cluster was lost.
        PermissionError: the cluster has another token.

    Example:
        >>> from unittest import mock
        >>> cluster = {"chief": ["a:2222"], "worker": ["b:2222"]}
        >>> with mock.patch.dict("os.environ", STRATAGEM_REMOTE_JOB="job"):  # as on the cluster
        ...     sg.connect_to_cluster(cluster)  # elsewhere: sends the script, exits at its end

    Source: TF 2.21 remote.py, connect_to_cluster.
    """
    if environment.lookup(JOB_VARIABLE) is not None:
        return
    values = (job_name, task_index, protocol, cluster_device_filters)
    if values not in (("localhost", 0, None, None), ("localhost", 0, "grpc", None)):
        raise invalid(
            f"job_name, task_index, protocol and cluster_device_filters are {values!r}.",
            expected='"localhost", 0, None or "grpc", and None: this program is not a task.',
            fix="omit them; tasks of the cluster run `stratagem server`.",
        )
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script is None:
        raise RuntimeError(
            explain(
                "There is no script to send: this is an interactive session.",
                expected="a program in a file.",
                fix="save it, or send a function: sg.remote.RemoteCluster(...).run(train).",
            )
        )
    cluster = RemoteCluster(cluster_spec_or_resolver, **options)
    module = getattr(getattr(main, "__spec__", None), "name", None)
    sys.exit(exit_code(cluster.run_script(script, sys.argv[1:], module=module)))
