"""Program of a job: runs what a client has sent, and reports on it in the log of the job.

The program runs once, on the head, if the cluster has parameter servers or is a plain Ray cluster;
otherwise in an actor on the machine of each task that trains, until all end or one fails. It dies
with the process that started it. `protocol.py` says what the job reports.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import dataclasses
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem import environment
from stratagem.cluster.addresses import free_ports, join_address, split_address
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import UnavailableError, explain
from stratagem.group.authentication.secret import with_secret
from stratagem.launch.remote.jobs_client import JobsClient
from stratagem.launch.remote.protocol import (
    ANSWER,
    FrameWriter,
    JobPlan,
    answer_key,
    renewal_s,
    signed,
)
from stratagem.launch.remote.ray_cluster import RayWatch, load_ray, watched_addresses
from stratagem.launch.remote.ray_nodes import Session, resource_of_task
from stratagem.resources import Closing, TemporaryFolder

_POLL_S = 0.5


def main(text: str) -> int:
    """Runs the job of a plan in JSON; returns the exit code."""
    plan = JobPlan(**json.loads(text))
    frames = FrameWriter(plan.nonce, sys.stdout.fileno())
    is_over = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: is_over.set())
    if plan.heartbeat_s is not None:
        arguments: tuple[Any, ...] = (plan.heartbeat_s, frames)
        threading.Thread(target=_send_heartbeats, args=arguments, daemon=True).start()
    if plan.lease_s is not None:
        arguments = (plan, plan.lease_s, frames, is_over)
        threading.Thread(target=_watch_client, args=arguments, daemon=True).start()
    own = ".".join(map(str, sys.version_info[:2]))
    if plan.python not in ("", own):
        why = explain(
            f"The client has Python {plan.python}, but this cluster has Python {own}.",
            expected="the same version: a function is sent as compiled code.",
            fix="use the same version on both sides, or send a script with connect_to_cluster.",
        )
        frames.write("note", why)
        frames.write("end", "1")
        return 1
    code, answer = run(plan, frames, is_over)
    if answer:
        frames.write("answer", signed(answer, answer_key(plan.nonce)))
    frames.write("end", str(code))
    return code if 0 <= code < 256 else 128 - code


def _send_heartbeats(pause_s: float, frames: FrameWriter) -> None:
    while True:  # also while the program ends
        frames.write("heartbeat", "")
        time.sleep(pause_s)


class LeaseWatch:
    """Checks in a job whether its client renews the lease, at the port for jobs."""

    def __init__(self, jobs: JobsClient, nonce: str, limit_s: float) -> None:
        self._jobs, self._nonce, self._limit_s = jobs, nonce, limit_s
        self._number = 1
        self._seen_s = time.monotonic()

    def is_over(self) -> bool:
        """Returns True if the lease was not renewed within the limit."""
        try:
            while self._jobs.is_renewed(self._nonce, self._number):
                self._number += 1
                self._seen_s = time.monotonic()
        except (UnavailableError, PermissionError):
            self._seen_s = time.monotonic()  # no client could renew now
        return time.monotonic() - self._seen_s > self._limit_s


def _watch_client(
    plan: JobPlan, limit_s: float, frames: FrameWriter, is_over: threading.Event
) -> None:
    """Ends the job when its client is gone."""
    url = plan.url
    if not url:  # of a plain Ray cluster, which the client may reach under another name
        url = f"http://{load_ray().init(logging_level='error', log_to_driver=False).dashboard_url}"
    watch = LeaseWatch(JobsClient(url), plan.nonce, limit_s)
    while not is_over.wait(renewal_s(limit_s)):
        if watch.is_over():
            why = explain(
                f"The client of this job has not responded for {limit_s:g} s.",
                expected="a client that runs as long as its job.",
                fix="pass stop_with_client=False for a job that continues without its client; "
                "STRATAGEM_CLIENT_TIMEOUT_S changes the limit.",
            )
            frames.write("note", why)
            is_over.set()


# Process of a program, on the head or in an actor on the machine of its task.

# "out", "err", "answer" or "end", and a text: output, answer in base64, or exit code.
TaskMessage = tuple[str, str]
# Delay until the end of a process is noticed while its children keep its output open.
_LOOK_S = 0.05
_READ_BYTES = 2**16
_GRACE_S = 10.0


class JobProcess(Closing):
    """Runs one process, which ends with this one, together with the processes that it starts.

    Other tasks reach its machine at `host`. An exit code is negative for a signal. The process
    waits where its output is not read.
    """

    def __init__(self, host: str = "") -> None:
        self._host = host
        self._folder = TemporaryFolder("stratagem-task-")
        self._session: Session | None = None
        self._pipes = selectors.DefaultSelector()
        self._reading = threading.Lock()

    def free_address(self) -> tuple[str, int]:
        """Returns the host and a free port."""
        return self._host, free_ports(1)[0]

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], without: tuple[str, ...] = ()
    ) -> None:
        """Starts the process with arguments for this Python.

        `variables` are added to this process's environment, `without` names that begin so.
        """
        answer = str(self._folder.path / "answer")
        words = [word.replace(ANSWER, answer) for word in command]
        inherited = environment.snapshot().items()
        own = {name: text for name, text in inherited if not name.startswith(without)}
        self._session = Session(
            (sys.executable, *words),
            {**own, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        process = self._session.process
        for kind, pipe in (("out", process.stdout), ("err", process.stderr)):
            assert pipe is not None
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._pipes.register(pipe, selectors.EVENT_READ, (kind, decoder))

    def next(self, timeout_s: float) -> list[TaskMessage]:
        """Returns the messages since the last call; waits up to `timeout_s` for the first."""
        assert self._session is not None
        deadline_s = time.monotonic() + timeout_s
        while True:
            code = self._session.process.poll()
            if code is not None:
                self._session.close()  # else its children may print without end
            left_s = deadline_s - time.monotonic()
            # All that was printed before the end is read after it.
            if found := self._read(min(_LOOK_S, max(0.0, left_s)) if code is None else 0.0):
                return found
            if code is not None:
                with contextlib.suppress(OSError):  # no answer, or closed meanwhile
                    answer = (self._folder.path / "answer").read_bytes()
                    found.append(("answer", base64.b64encode(answer).decode("ascii")))
                return [*found, ("end", str(code))]
            if left_s <= 0:
                return []

    def end(self) -> None:
        """Sends SIGTERM, and SIGKILL after 10 s."""
        if self._session is not None:
            self._session.end(_GRACE_S)

    def close(self) -> None:
        """Ends the process."""
        self.end()
        if self._session is not None:
            self._session.close()
        with self._reading:
            for key in list(self._pipes.get_map().values()):
                self._close_pipe(key.fileobj)
        self._folder.close()

    def _read(self, timeout_s: float) -> list[TaskMessage]:
        found: list[TaskMessage] = []
        with self._reading:
            for key, _ in self._pipes.select(timeout_s):
                kind, decoder = key.data
                data = os.read(key.fd, _READ_BYTES)
                if text := decoder.decode(data, final=not data):
                    found.append((kind, text))
                if not data:
                    self._close_pipe(key.fileobj)
        return found

    def _close_pipe(self, pipe: Any) -> None:
        self._pipes.unregister(pipe)
        pipe.close()


# The program as one task or several, until all end or one fails.

_CLOSING_S = 15.0


class _RemoteProcess:
    """A `JobProcess` in an actor on the machine of its task."""

    def __init__(self, name: str, actor: Any) -> None:
        self._name, self.actor = name, actor
        self._is_closed = False

    def next(self, timeout_s: float) -> list[TaskMessage]:
        """Returns the messages since the last call; the end if the machine is lost."""
        try:
            # A future waits in Python: a call of Ray would not return once Ray is lost.
            return self.actor.next.remote(timeout_s).future().result()
        except load_ray().exceptions.RayError as error:
            why = ("err", f"The machine of {self._name} was lost: {error}\n")
            return [("end", "1")] if self._is_closed else [why, ("end", "1")]

    def end(self) -> None:
        """Sends SIGTERM, and SIGKILL after 10 s; does not wait."""
        self.actor.end.remote()

    def close(self) -> None:
        """Ends the process and its actor."""
        self._is_closed = True
        ray = load_ray()
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            self.actor.close.remote().future().result(_CLOSING_S)
        ray.kill(self.actor)


@dataclasses.dataclass(eq=False)
class _JobTask:
    """The program as one task; an empty `kind` is the only one."""

    process: JobProcess | _RemoteProcess
    kind: str = ""
    index: int = 0
    code: int = 1  # until it has ended
    answer: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.index}" if self.kind else ""

    def report(self, frames: FrameWriter, ended: queue.SimpleQueue[_JobTask]) -> None:
        """Writes the output of the task until it ends."""
        kind = ""
        try:
            while kind != "end":
                for kind, text in self.process.next(_POLL_S):
                    if kind == "end":
                        self.code = int(text)
                    elif kind == "answer":
                        self.answer = text
                    else:
                        frames.write(kind, text, self.name)
        finally:
            ended.put(self)


def run(plan: JobPlan, frames: FrameWriter, is_over: threading.Event) -> tuple[int, str]:
    """Runs the program of a job until its tasks end, one fails, or `is_over` is set.

    Returns the exit code of the task that failed first, or 0; and the answer of that task, or of
    the task in `plan.answers`.
    """
    losses: list[Exception] = []
    with contextlib.ExitStack() as watching:
        if plan.tasks:
            ray = load_ray()
            ray.init(address=plan.head or None, logging_level="error", log_to_driver=False)
            tasks = _start_tasks(plan)
            watching.enter_context(RayWatch(watched_addresses(), losses.append))
        else:
            tasks = [_start_here(plan)]
        frames.write("started", "")
        failed = _follow(tasks, frames, is_over, losses)
    if losses:  # Ray would not answer; the tasks end with their actors
        frames.write("note", str(losses[0]))
        return 1, ""
    for task in tasks:
        task.process.end()  # all at once, before it is waited for each
    for task in tasks:
        task.process.close()
    if failed is not None:
        return failed.code, failed.answer
    chosen = tuple(plan.answers or (tasks[0].kind, tasks[0].index))
    return 0, next(one.answer for one in tasks if (one.kind, one.index) == chosen)


def _follow(
    tasks: Sequence[_JobTask],
    frames: FrameWriter,
    is_over: threading.Event,
    losses: Sequence[Exception],
) -> _JobTask | None:
    """Waits until all tasks end, one fails or Ray is lost; returns the task that failed."""
    ended: queue.SimpleQueue[_JobTask] = queue.SimpleQueue()
    for task in tasks:
        threading.Thread(target=task.report, args=(frames, ended), daemon=True).start()
    num_left, were_asked = len(tasks), False
    while num_left and not losses:
        if is_over.is_set() and not were_asked:
            were_asked = True
            for task in tasks:
                task.process.end()
        try:
            task = ended.get(timeout=_POLL_S)
        except queue.Empty:
            continue
        num_left -= 1
        if task.code:
            return task
    return None


def _start_here(plan: JobPlan) -> _JobTask:
    """Starts the program as one process, the coordinator of the cluster."""
    config: dict[str, Any] = {"cluster": plan.cluster}
    if "chief" in plan.cluster:
        config["task"] = {"type": "chief", "index": 0}
    text = json.dumps(config) if plan.cluster else ""
    process = JobProcess()
    process.start(plan.command, {**plan.variables(), "TF_CONFIG": text})
    return _JobTask(process)


def _start_tasks(plan: JobPlan) -> list[_JobTask]:
    """Starts all tasks, at free ports: Ray itself listens at the address of the leader."""
    actor_class = load_ray().remote(JobProcess)
    spec = ClusterSpec(plan.cluster)
    tasks: list[_JobTask] = []
    actors: list[Any] = []
    for kind, index in plan.tasks:
        options = {"num_cpus": 0, "resources": {resource_of_task(kind, index): 1}}
        host, _ = split_address(spec.task_address(kind, index))
        # It is read while it is asked to end, and closed then.
        actors.append(actor_class.options(**options, max_concurrency=3).remote(host))
        tasks.append(_JobTask(_RemoteProcess(f"{kind} {index}", actors[-1]), kind, index))
    cluster: dict[str, dict[int, str]] = {}
    asked = [actor.free_address.remote() for actor in actors]
    for task, answer in zip(tasks, asked, strict=True):
        address = join_address(*answer.future().result())
        cluster.setdefault(task.kind, {})[task.index] = address
    jobs, shared = ClusterSpec(cluster).as_dict(), with_secret(plan.variables())
    starts: list[Any] = []
    for task, actor in zip(tasks, actors, strict=True):
        config = {"cluster": jobs, "task": {"type": task.kind, "index": task.index}}
        variables = {**shared, "TF_CONFIG": json.dumps(config)}
        # Ray's variables describe the actor, which is no driver.
        starts.append(actor.start.remote(plan.command, variables, ("RAY_", "TF_CONFIG")))
    for start in starts:
        start.future().result()
    return tasks


if __name__ == "__main__":
    # Under its own name: Ray imports the class of its actors by it.
    from stratagem.launch.remote.job import main as main_of_job

    raise SystemExit(main_of_job(sys.argv[1]))
