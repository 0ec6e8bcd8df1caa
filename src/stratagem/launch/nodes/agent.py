"""Launcher of a node other than 0: starts the tasks that node 0 assigns, and reports their ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import platform
import queue
import signal
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem import environment, settings
from stratagem.cluster.accelerators import local_gpus
from stratagem.cluster.addresses import free_ports
from stratagem.errors import UnavailableError, explain
from stratagem.group.authentication.connections import connect, frame, read_frame
from stratagem.group.authentication.secret import Credentials
from stratagem.launch.nodes.rendezvous import LIMIT_OPTION, PURPOSE, MeetingPoint, beat_s
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.plan.task_plan import (
    RestartFolders,
    make_restart_folders,
    plan_own_tasks,
    uses_gpus,
)
from stratagem.launch.prefork.warm_start import WARM_UP_AFTER_S, WarmStart, can_fork
from stratagem.launch.restart.launcher import Outcome
from stratagem.launch.restart.running_tasks import RunningTask, RunningTasks
from stratagem.launch.restart.task_group import ENDING, CaughtSignals
from stratagem.launch.tasks.exit_status import ExitStatus, describe_exit
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.output.screen import Screen
from stratagem.resources import Closing

# Connection of a node to the rendezvous on node 0.

_RETRY_S = 0.3
_CONNECT_S = 5.0
_CLOSE_S = 2.0


class NodeLink(Closing):
    """One connection, in a background thread: connects, greets, and exchanges heartbeats.

    `hello` is the greeting without the own address. The last of the `messages` is `lost` (with a
    `reason`), `refused` (with a `text`) or, if node 0 could not be reached within `join_s`,
    `absent`.
    """

    def __init__(
        self,
        point: MeetingPoint,
        hello: dict[str, Any],
        credentials: Credentials | None = None,
        *,
        timeout_s: float,
        join_s: float,
    ) -> None:
        self._point = point
        self._credentials = credentials or Credentials()
        self._hello = hello
        self._timeout_s = timeout_s
        self._join_s = join_s
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._writer: asyncio.StreamWriter | None = None
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._run())
        self._thread = threading.Thread(target=self._run_loop, name="stratagem-node", daemon=True)
        self._thread.start()

    def take(self, wait_s: float) -> dict[str, Any] | None:
        """Returns the next message; None if there is none for `wait_s` seconds."""
        with contextlib.suppress(queue.Empty):
            return self._messages.get(timeout=wait_s) if wait_s else self._messages.get_nowait()
        return None

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message without waiting; it is dropped if the connection is closed."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._write, message)

    def close(self) -> None:
        """Closes the connection when sent messages are written."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(_CLOSE_S)

    def _run_loop(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        self._loop.close()

    async def _run(self) -> None:
        reader = await self._connect()
        if reader is None:
            return
        beating = self._loop.create_task(self._beat())
        try:
            while True:
                async with asyncio.timeout(self._timeout_s):
                    message = await read_frame(reader)
                if message.get("kind") != "beat":
                    self._messages.put(message)
        except TimeoutError:
            self._lost(f"no answer from node 0 for {self._timeout_s:g} s, {LIMIT_OPTION}")
        except OSError:
            self._lost("node 0 closed the connection; its launcher ended or was killed")
        finally:
            beating.cancel()
            if self._writer is not None:
                with contextlib.suppress(OSError):
                    self._writer.close()
                    async with asyncio.timeout(_CLOSE_S):
                        await self._writer.wait_closed()

    async def _connect(self) -> asyncio.StreamReader | None:
        deadline_s = time.monotonic() + self._join_s
        while True:
            try:
                reader, writer = await connect(
                    self._point.host,
                    self._point.port,
                    self._credentials,
                    "node",
                    purpose=PURPOSE,
                    server=f"node 0 ({self._point.address})",
                    limit_s=_CONNECT_S,
                )
                break
            except ValueError as error:
                self._messages.put({"kind": "refused", "text": str(error), "is_final": True})
                return None
            except OSError as error:
                if time.monotonic() > deadline_s:
                    reason = str(error) or "no answer"
                    self._messages.put({"kind": "absent", "reason": reason})
                    return None
            await asyncio.sleep(_RETRY_S)
        self._writer = writer
        address = writer.get_extra_info("sockname")[0]
        own = {"host": platform.node(), "pid": os.getpid(), "address": address}
        self._write({"kind": "hello", **own, **self._hello})
        return reader

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(beat_s(self._timeout_s))
            self._write({"kind": "beat"})

    def _write(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    def _lost(self, reason: str) -> None:
        self._messages.put({"kind": "lost", "reason": reason})


_POLL_S = 0.05
# After a signal has ended the tasks here, the whole job may be ending too, which node 0 reports.
_LEAVE_S = 2.0


def run_node(
    command: Sequence[str],
    options: LaunchOptions,
    point: MeetingPoint,
    credentials: Credentials | None = None,
) -> Outcome:
    """Joins node 0 and runs the tasks that it assigns, until it ends the job.

    After the loss of node 0 the tasks are ended; the node joins again if restarts are allowed.
    Raises UnavailableError if node 0 is lost for good, ValueError if it refuses this node.
    """
    base = environment.snapshot()
    with (
        CaughtSignals() as caught,
        Guardian() as guardian,
        make_restart_folders(options, base) as folders,
        WarmStart(base) as warm,
    ):
        is_warm = options.max_restarts > 0 and not options.cold_restarts
        agent = _Agent(
            command=command,
            options=options,
            point=point,
            credentials=credentials,
            base=base,
            gpus=local_gpus() if uses_gpus(base) else (),
            caught=caught,
            guardian=guardian,
            folders=folders,
            warm=warm if is_warm and can_fork(command, base) else None,
        )
        return agent.run()


@dataclasses.dataclass(kw_only=True)
class _Agent:
    command: Sequence[str]
    options: LaunchOptions
    point: MeetingPoint
    credentials: Credentials | None
    base: Mapping[str, str]
    gpus: Sequence[str]
    caught: CaughtSignals
    guardian: Guardian
    folders: RestartFolders
    warm: WarmStart | None
    screen: Screen = dataclasses.field(default_factory=lambda: Screen([]))
    token: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    label: str = ""
    running: RunningTasks | None = None
    start: int = 0
    reported: set[tuple[str, str]] = dataclasses.field(default_factory=set[tuple[str, str]])

    def run(self) -> Outcome:
        """Joins as often as it takes."""
        outcome: Outcome | None = None
        while outcome is None:
            hello = {
                "token": self.token,
                "rank": self.point.rank,
                "workers": self.options.workers,
                "input_workers": self.options.input_workers,
                "nnodes": [self.point.least, self.point.most],
            }
            limits_s = {
                "timeout_s": self.options.node_timeout_s,
                "join_s": float(settings.read("join_timeout_s")),
            }
            with NodeLink(self.point, hello, self.credentials, **limits_s) as link:
                try:
                    outcome = self.serve(link)
                finally:
                    self.stop()
        return outcome

    def serve(self, link: NodeLink) -> Outcome | None:
        """Follows node 0; returns None if the connection is lost and another may be made."""
        left_s = 0.0
        while True:
            if self.running is not None:
                self.running.read()
            message = link.take(_POLL_S if self.running is None else 0)
            if message is not None and message["kind"] in _LAST:
                return self.end(message)
            if message is not None:
                self.follow(message, link)
            self.forward_signals(link)
            if self.running is not None:
                self.running.update(time.monotonic())
                self.report(self.running, link)
                left_s = time.monotonic() + _LEAVE_S
            elif self.caught.ending is not None and time.monotonic() > left_s:
                self.screen.say([f"{self.caught.ending.name}: this node leaves the job."])
                return Outcome(statuses=(), signum=self.caught.ending, restart=0)

    def follow(self, message: dict[str, Any], link: NodeLink) -> None:
        """Does what a message of node 0 asks for."""
        kind = message["kind"]
        if kind == "welcome":
            self.label = f"node {message['rank']}"
            self.screen.say([f"This is {self.label} of the job of {self.point.address}."])
        elif kind == "ports":
            ports = free_ports(message["count"])
            link.send({"kind": "ports", "start": message["start"], "ports": ports})
        elif kind == "start":
            self.begin(message, link)
        elif kind == "signal" and self.running is not None and message["start"] == self.start:
            for task in self.running.tasks:
                if task.process.plan.name == message["task"]:
                    _send_once(task, message["signum"])

    def begin(self, message: dict[str, Any], link: NodeLink) -> None:
        """Starts the tasks of this node; reports those that cannot start as failed."""
        names = [f"{kind} {index}" for kind, index in message["tasks"]]
        self.start, self.reported = message["start"], set()
        self.running = RunningTasks(self.options, Screen(names), self.guardian)
        warm = self.warm if message["is_warm"] else None
        try:
            plans = plan_own_tasks(
                [(kind, index) for kind, index in message["tasks"]],
                self.options,
                self.command,
                cluster=message["cluster"],
                gpus=self.gpus,
                base=self.base,
                restart=message["restart"],
                folders=self.folders,
            )
            if warm is not None:
                warm.load(plans, lambda: self.caught.ending is not None)
            for plan in plans:
                self.running.start(plan, self.base, warm, is_leader=False)
        except (OSError, ValueError) as error:
            self.running.close()
            self.running = None
            for name in names:
                link.send(self.about(name, "exited", returncode=1, lines=str(error).splitlines()))
                link.send(self.about(name, "gone"))

    def about(self, task: str, kind: str, **more: object) -> dict[str, Any]:
        """Returns a message about a task of the present start."""
        return {"kind": kind, "start": self.start, "task": task, **more}

    def report(self, running: RunningTasks, link: NodeLink) -> None:
        """Reports tasks that have ended, once each."""
        for task in running.tasks:
            name, status = task.process.plan.name, task.status
            if status is not None and (name, "exited") not in self.reported:
                self.reported.add((name, "exited"))
                reason = ""
                if status.returncode and self.caught.ending is not None:
                    how = describe_exit(status.returncode)
                    reason = f"{how}, after {self.caught.ending.name} to the launcher of its node"
                code, lines = status.returncode, status.lines
                link.send(self.about(name, "exited", returncode=code, lines=lines, reason=reason))
            if task.process.is_gone and (name, "gone") not in self.reported:
                self.reported.add((name, "gone"))
                link.send(self.about(name, "gone"))
        if running.is_gone:
            running.close()
            self.running = None
        elif self.warm is not None and time.monotonic() - self.warm.made_s >= WARM_UP_AFTER_S:
            self.warm.prepare(running.tasks[0].process.plan)

    def forward_signals(self, link: NodeLink) -> None:
        """Sends signals to the tasks of this node; a node that is to end takes no more tasks."""
        for signum in self.caught.take():
            if signum in ENDING:
                link.send({"kind": "leaving"})
            for task in self.running.tasks if self.running is not None else ():
                if not task.process.is_gone:
                    _send_once(task, signum)

    def stop(self) -> None:
        """Ends the tasks that still run: at first by SIGTERM."""
        running, self.running = self.running, None
        if running is None:
            return
        for task in running.tasks:
            task.stop()
        deadline_s = time.monotonic() + self.options.grace_s
        while not running.is_gone and time.monotonic() < deadline_s:
            running.read()
            running.update(time.monotonic())
        running.close()

    def end(self, message: dict[str, Any]) -> Outcome | None:
        """Returns the outcome of the job, or None to join again."""
        kind = message["kind"]
        if kind == "end" and message["error"]:
            raise UnavailableError(message["error"])
        if kind == "end":
            self.screen.say([f"Node 0 ended the job: {message['summary']}."])
            cause = message["cause"]
            done = ExitStatus(name="worker 0", returncode=0, at_s=0.0)
            status = done if cause is None else ExitStatus(at_s=0.0, **cause)
            return Outcome(statuses=(status,), signum=self.caught.ending, restart=0)
        if kind == "refused" and message["is_final"]:
            raise ValueError(message["text"])
        if kind == "refused":
            self.screen.say([f"Cannot join yet: {message['text']}"])
            time.sleep(1.0)
            return None
        self.screen.say([f"Node 0 at {self.point.address} is lost: {message['reason']}."])
        if kind == "lost" and self.options.max_restarts and self.caught.ending is None:
            self.screen.say(["Ending the tasks of this node, then joining again."])
            return None
        raise UnavailableError(
            explain(
                f"Node 0 at {self.point.address} is lost: {message['reason']}.",
                expected="a launcher there: within STRATAGEM_JOIN_TIMEOUT_S at first, and then "
                f"one that answers within --node-timeout-s ({self.options.node_timeout_s:g} s).",
                fix="see the report on node 0; check that this address can be reached from here.",
            )
        )


_LAST = ("end", "refused", "lost", "absent")


def _send_once(task: RunningTask, signum: int) -> None:
    """Sends a signal; an interrupt only once, as it may come from here and from node 0."""
    if signum != signal.SIGINT or signum not in task.process.signals:
        task.process.send(signum)
