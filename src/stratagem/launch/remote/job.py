"""Program of a job: runs what a client has sent, and reports on it in the log of the job.

The client submits a job to Ray whose command is this program and a `JobPlan`, and follows the log,
which Ray streams to it. The job prints frames there: heartbeats from the beginning on, "started"
before the program, its output as "out" and "err", then its "answer" and the "end" with the exit
code; a "note" is a message of the job itself. The client renews a lease by small uploads.

The program runs once, on the head, if the cluster has parameter servers or is a plain Ray cluster;
otherwise in an actor on the machine of each task that trains, until all end or one fails.

If the client is gone, the lease expires and the program ends; if the client stops the job, Ray
sends SIGTERM. If the job is stopped or lost, the client misses its heartbeats. If a machine or Ray
itself is lost, the job says so and ends. A program dies with the process that started it.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import dataclasses
import hashlib
import hmac
import http.client
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from stratagem import environment
from stratagem.cluster.addresses import free_ports, join_address, split_address
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import explain, invalid
from stratagem.group.authentication.secret import with_secret
from stratagem.launch.remote.ray_cluster import (
    RayWatch,
    load_ray,
    read_token,
    watched_addresses,
)
from stratagem.launch.remote.ray_nodes import resource_of_task
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.tied_process import tied_command
from stratagem.resources import Closing, TemporaryFolder

JOB_VARIABLE = "STRATAGEM_REMOTE_JOB"
"""Environment variable of programs that a client has sent: the nonce of their job."""
ANSWER = "{answer}"
"""Stands for the file of the answer in the command of a program."""
_POLL_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Program, tasks and limits of a job.

    `command` has arguments for this Python. `nonce` is a random number that only client and job
    share. An empty `cluster` is a plain Ray cluster; without `tasks` one process runs on the head.
    An empty `head` or `url` (where the head accepts jobs) asks Ray. The job continues for `lease_s`
    without its client, or forever if None; it sends a heartbeat every `heartbeat_s`, or none if
    None. `answers` is the task whose answer is returned unless another fails, None for the first.
    `python` is the version that a pickled function needs, such as "3.11"; "" for any.
    """

    nonce: str
    command: Sequence[str]
    cluster: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tasks: Sequence[Sequence[Any]] = ()
    head: str = ""
    url: str = ""
    lease_s: float | None = None
    heartbeat_s: float | None = None
    answers: Sequence[Any] | None = None
    python: str = ""

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of each process of the program."""
        found = {JOB_VARIABLE: self.nonce, "PYTHONUNBUFFERED": "1"}
        return {**found, "RAY_ADDRESS": self.head} if self.head else found


def main(text: str) -> int:
    """Runs the job of a plan in JSON; returns the exit code."""
    plan = JobPlan(**json.loads(text))
    frames = FrameWriter(plan.nonce, sys.stdout.fileno())
    is_over = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: is_over.set())
    if plan.heartbeat_s is not None:
        arguments = (frames, plan.heartbeat_s)
        threading.Thread(target=_send_heartbeats, args=arguments, daemon=True).start()
    if plan.lease_s is not None:
        watch = threading.Thread(
            target=_watch_client, args=(plan, plan.lease_s, frames, is_over), daemon=True
        )
        watch.start()
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
    run = run_in_lockstep if plan.tasks else _run_here
    code, answer = run(plan, frames, is_over)
    if answer:
        frames.write("answer", signed(answer, answer_key(plan.nonce)))
    frames.write("end", str(code))
    return code if 0 <= code < 256 else 128 - code


def _send_heartbeats(frames: FrameWriter, pause_s: float) -> None:
    while True:
        frames.write("heartbeat", "")
        time.sleep(pause_s)


# Frames: messages from a job to its client, as marked lines of the job's log.
#
# A line is a mark, the job's nonce and JSON in ASCII, so that any output of a program arrives
# unchanged: Ray's log mixes both streams, contains lines of Ray, and turns carriage returns into
# line ends. The numbers tell what is new when a client reads the log again.

_MARK = "\x1e"
# Ray's own messages with ten lines each must stay below 4 MB.
_MAX_TEXT = 32_000
_MAX_LINE = 2**20


@dataclasses.dataclass(frozen=True)
class LogFrame:
    """One message of a job.

    `kind` is "out", "err", "heartbeat", "started", "note", "answer" or "end"; `task` is "" for the
    job itself.
    """

    kind: str
    task: str
    text: str


class FrameWriter:
    """Writes the frames of a job to the file descriptor of its log. Thread-safe."""

    def __init__(self, nonce: str, descriptor: int) -> None:
        self._nonce = nonce
        self._descriptor = descriptor
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def write(self, kind: str, text: str, task: str = "") -> None:
        """Writes a frame, or several for a long text."""
        pieces = [text[at : at + _MAX_TEXT] for at in range(0, len(text), _MAX_TEXT)] or [""]
        with self._lock:
            for piece in pieces:
                content = json.dumps([next(self._numbers), kind, task, piece])
                # One write, so that nothing comes between; the newline ends a foreign line.
                line = f"\n{_MARK}{self._nonce}{content}\n".encode("ascii")
                while line:
                    line = line[os.write(self._descriptor, line) :]


class FrameReader:
    """Finds each frame once, even if the log is read again; `others` are the last lines."""

    def __init__(self, nonce: str) -> None:
        self._mark = f"{_MARK}{nonce}"
        self._pending = ""
        self._last = 0
        self.others: list[str] = []

    def feed(self, text: str) -> Iterator[LogFrame]:
        """Adds the next part of the log; yields the frames that are complete."""
        *lines, self._pending = (self._pending + text).split("\n")
        self._pending = self._pending[:_MAX_LINE]
        for line in lines:
            before, mark, content = line.partition(self._mark)
            if before.strip():
                self.others = [*self.others[-99:], before]
            if not mark:
                continue
            try:
                number, *words = json.loads(content)
            except (RecursionError, TypeError, ValueError):
                continue  # cut by a lost connection; it will be read again
            if list(map(type, [number, *words])) == [int, str, str, str] and number > self._last:
                self._last = number
                yield LogFrame(*words)


def answer_key(nonce: str) -> bytes:
    """Returns the key with which a job signs its answer."""
    return f"{read_token()} {nonce}".encode()


def signed(answer: str, key: bytes) -> str:
    """Returns an answer, text in base64, behind its signature by the shared key."""
    return hmac.new(key, answer.encode(), hashlib.sha256).hexdigest() + answer


def verified(text: str, key: bytes) -> bytes:
    """Returns the bytes of a signed answer; raises ValueError if the signature does not match."""
    length = 2 * hashlib.sha256().digest_size
    if not hmac.compare_digest(signed(text[length:], key).encode(), text.encode()):
        raise invalid(
            "The signature of the job's answer is wrong.",
            expected="an answer from the program that this client sent.",
            fix="run it again; if this repeats, check who else can write to the cluster.",
        )
    return base64.b64decode(text[length:])


# Lease of a client, so that its job ends when the client is gone.
#
# A client may reach nothing but the port for jobs, and uploads are the only requests there that a
# job can see. So the client uploads small packages with increasing numbers in their names, and the
# job asks for the next one. Ray deletes such packages after some minutes.

RENEWALS_PER_LEASE = 6
"""Number of renewals, and of looks for them, within the limit of a lease."""
_REQUEST_S = 30.0
_NOT_FOUND = 404


def lease_path(nonce: str, number: int) -> str:
    """Returns the path of a renewal at the port for jobs."""
    return f"/api/packages/gcs/stratagem_client_{nonce}_{number}.zip"


class LeaseWatch:
    """Checks in a job whether its client renews the lease, at the URL of the port for jobs."""

    def __init__(self, url: str, nonce: str, limit_s: float) -> None:
        self._url, self._nonce, self._limit_s = url, nonce, limit_s
        self._number = 1
        self._seen_s = time.monotonic()

    def is_over(self) -> bool:
        """Returns True if the lease was not renewed within the limit."""
        try:
            while self._is_renewed():
                self._number += 1
                self._seen_s = time.monotonic()
        except (OSError, http.client.HTTPException):
            self._seen_s = time.monotonic()  # no client could renew now
        return time.monotonic() - self._seen_s > self._limit_s

    def _is_renewed(self) -> bool:
        token = read_token()
        request = urllib.request.Request(  # noqa: S310 - http or https
            self._url + lease_path(self._nonce, self._number),
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )
        try:
            urllib.request.urlopen(request, timeout=_REQUEST_S).close()  # noqa: S310
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == _NOT_FOUND:
                return False
            raise
        return True


def _watch_client(
    plan: JobPlan, limit_s: float, frames: FrameWriter, is_over: threading.Event
) -> None:
    """Ends the job when its client is gone."""
    url = plan.url
    if not url:  # of a plain Ray cluster, which the client may reach under another name
        url = f"http://{load_ray().init(logging_level='error', log_to_driver=False).dashboard_url}"
    watch = LeaseWatch(url, plan.nonce, limit_s)
    while not is_over.wait(limit_s / RENEWALS_PER_LEASE):
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
_MAX_MESSAGES = 1000
_READ_BYTES = 2**16
_GRACE_S = 10.0


class JobProcess(Closing):
    """Runs one process, which ends with this one, together with the processes that it starts.

    Other tasks reach its machine at `host`. An exit code is negative for a signal.
    """

    def __init__(self, host: str = "") -> None:
        self._host = host
        self._messages: queue.Queue[TaskMessage] = queue.Queue(_MAX_MESSAGES)
        self._folder = TemporaryFolder("stratagem-task-")
        self._process: subprocess.Popen[bytes] | None = None

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
        own = {
            name: text
            for name, text in environment.snapshot().items()
            if not name.startswith(without)
        }
        is_running = threading.Event()
        # The process is tied to the thread that starts it.
        threading.Thread(
            target=self._keep, args=(words, {**own, **variables}, is_running), daemon=True
        ).start()
        is_running.wait()

    def next(self, timeout_s: float) -> list[TaskMessage]:
        """Returns the messages since the last call; waits up to `timeout_s` for the first."""
        found: list[TaskMessage] = []
        try:
            found.append(self._messages.get(timeout=timeout_s))
            while len(found) < _MAX_MESSAGES:
                found.append(self._messages.get_nowait())
        except queue.Empty:
            pass
        return found

    def end(self) -> None:
        """Sends SIGTERM, and SIGKILL after 10 s."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def close(self) -> None:
        """Ends the process."""
        self.end()
        self._folder.close()

    def _keep(
        self, words: Sequence[str], variables: Mapping[str, str], is_running: threading.Event
    ) -> None:
        code = 1
        try:
            with Guardian() as guardian:
                self._process = process = subprocess.Popen(  # noqa: S603 - the user's program
                    tied_command((sys.executable, *words)),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
                guardian.watch(process.pid)
                is_running.set()
                pumps = [
                    threading.Thread(target=self._pump, args=(kind, pipe), daemon=True)
                    for kind, pipe in (("out", process.stdout), ("err", process.stderr))
                ]
                for pump in pumps:
                    pump.start()
                code = process.wait()
                # Else its children would hold its output open.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                for pump in pumps:
                    pump.join()
                guardian.forget(process.pid)
        except OSError as error:  # such as too many processes
            self._messages.put(("err", f"The program cannot start: {error}\n"))
        finally:
            is_running.set()
        with contextlib.suppress(OSError):  # no answer, or closed meanwhile
            answer = (self._folder.path / "answer").read_bytes()
            self._messages.put(("answer", base64.b64encode(answer).decode("ascii")))
        self._messages.put(("end", str(code)))

    def _pump(self, kind: str, pipe: IO[bytes]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with pipe:
            while data := os.read(pipe.fileno(), _READ_BYTES):
                if text := decoder.decode(data):
                    self._messages.put((kind, text))


def _run_here(plan: JobPlan, frames: FrameWriter, is_over: threading.Event) -> tuple[int, str]:
    """Runs the program as one process, the coordinator of the cluster."""
    config: dict[str, Any] = {"cluster": plan.cluster}
    if "chief" in plan.cluster:
        config["task"] = {"type": "chief", "index": 0}
    text = json.dumps(config) if plan.cluster else ""
    with JobProcess() as task:
        frames.write("started", "")
        task.start(plan.command, {**plan.variables(), "TF_CONFIG": text})

        def end_when_over() -> None:
            is_over.wait()
            task.end()

        # Beside this thread, which reads the last output meanwhile.
        threading.Thread(target=end_when_over, daemon=True).start()
        answer = ""
        while True:
            for kind, text in task.next(_POLL_S):
                if kind == "end":
                    return int(text), answer
                if kind == "answer":
                    answer = text
                else:
                    frames.write(kind, text)


# Lockstep: the program as every task of a cluster, each in an actor on its own machine.

_CLOSING_S = 15.0


@dataclasses.dataclass(eq=False)
class _JobTask:
    task_type: str
    index: int
    actor: Any
    pending: Any = None  # Ray's reference to the next messages
    code: int | None = None
    answer: str = ""

    @property
    def name(self) -> str:
        return f"{self.task_type} {self.index}"


def run_in_lockstep(
    plan: JobPlan, frames: FrameWriter, is_over: threading.Event
) -> tuple[int, str]:
    """Runs the program of a job as each of its tasks, until they end or `is_over` is set.

    Returns the exit code of the task that failed first, or 0; and the answer of that task, or of
    the task in `plan.answers`.
    """
    ray = load_ray()
    ray.init(address=plan.head or None, logging_level="error", log_to_driver=False)
    tasks = _start_tasks(ray, plan)
    frames.write("started", "")
    losses: list[Exception] = []
    with RayWatch(watched_addresses(), losses.append):
        failed = _follow_tasks(ray, tasks, frames, is_over, losses)
    if losses:  # Ray would not answer; the tasks end with their actors
        frames.write("note", str(losses[0]))
        return 1, ""
    closing = [task.actor.close.remote() for task in tasks]
    ray.wait(closing, num_returns=len(closing), timeout=_CLOSING_S)
    for task in tasks:
        ray.kill(task.actor)
    if failed is not None:
        return failed.code or 1, failed.answer
    chosen = plan.answers or plan.tasks[0]
    answers = {(task.task_type, task.index): task.answer for task in tasks}
    return 0, answers[chosen[0], chosen[1]]


def _start_tasks(ray: types.ModuleType, plan: JobPlan) -> list[_JobTask]:
    """Starts all tasks, at free ports: Ray itself listens at the address of the leader."""
    actor_class = ray.remote(JobProcess)
    spec = ClusterSpec(plan.cluster)
    tasks = [
        _JobTask(
            task_type,
            index,
            actor_class.options(
                num_cpus=0,
                resources={resource_of_task(task_type, index): 1},
                max_concurrency=2,
            ).remote(split_address(spec.task_address(task_type, index))[0]),
        )
        for task_type, index in plan.tasks
    ]
    addresses = ray.get([task.actor.free_address.remote() for task in tasks])
    cluster: dict[str, dict[int, str]] = {}
    for task, (host, port) in zip(tasks, addresses, strict=True):
        cluster.setdefault(task.task_type, {})[task.index] = join_address(host, port)
    jobs = ClusterSpec(cluster).as_dict()
    shared = with_secret(plan.variables())
    starts: list[Any] = []
    for task in tasks:
        config = {"cluster": jobs, "task": {"type": task.task_type, "index": task.index}}
        variables = {**shared, "TF_CONFIG": json.dumps(config)}
        # Ray's variables describe the actor, which is no driver.
        starts.append(task.actor.start.remote(plan.command, variables, ("RAY_", "TF_CONFIG")))
    ray.get(starts)
    return tasks


def _follow_tasks(
    ray: types.ModuleType,
    tasks: Sequence[_JobTask],
    frames: FrameWriter,
    is_over: threading.Event,
    losses: Sequence[Exception],
) -> _JobTask | None:
    """Writes the output of the tasks until all end, one fails or Ray is lost.

    Returns the task that failed, or None.
    """
    for task in tasks:
        task.pending = task.actor.next.remote(_POLL_S)
    while pending := [task.pending for task in tasks if task.code is None]:
        if losses:
            return None
        if is_over.is_set():
            ending = [task.actor.end.remote() for task in tasks]
            ray.wait(ending, num_returns=len(ending), timeout=_CLOSING_S)
        ready, _ = ray.wait(pending, num_returns=1, timeout=_POLL_S)
        for task in [task for task in tasks if task.pending in ready]:
            for kind, text in _messages(ray, task):
                if kind == "end":
                    task.code = int(text)
                elif kind == "answer":
                    task.answer = text
                else:
                    frames.write(kind, text, task.name)
            if task.code:
                return task
            if task.code is None:
                task.pending = task.actor.next.remote(_POLL_S)
    return None


def _messages(ray: types.ModuleType, task: _JobTask) -> list[TaskMessage]:
    try:
        return ray.get(task.pending)
    except ray.exceptions.RayError as error:
        return [("err", f"The machine of {task.name} was lost: {error}\n"), ("end", "1")]


if __name__ == "__main__":
    # Under its own name: Ray imports the class of its actors by it.
    from stratagem.launch.remote.job import main as main_of_job

    raise SystemExit(main_of_job(sys.argv[1]))
