"""Program of a job on the head of a cluster: runs a client's program and reports on it.

The program runs once, on the head, if the cluster has parameter servers or is a plain Ray cluster;
otherwise on the machine of each task that trains.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from typing import Any

from stratagem import environment
from stratagem.errors import explain
from stratagem.launch.remote.jobs.job_log import FrameWriter, signed
from stratagem.launch.remote.jobs.jobs_client import JobsClient, LeaseWatch
from stratagem.launch.remote.jobs.lockstep import JobPlan, answer_key, run_in_lockstep
from stratagem.launch.remote.ray.ray_cluster import dashboard_url
from stratagem.launch.remote.ray.streamed_process import StreamedProcess
from stratagem.resources import TemporaryFolder

_POLL_S = 0.5


def main(text: str) -> int:
    """Runs the job of a plan in JSON; returns the exit code."""
    plan = JobPlan.from_json(text)
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
        frames.write("note", _other_python(plan.python, own))
        frames.write("end", "1")
        return 1
    run = run_in_lockstep if plan.tasks else _run_here
    code, answer = run(plan, frames, is_over)
    if answer:
        frames.write("answer", signed(answer, answer_key(plan.nonce)))
    frames.write("end", str(code))
    return code if 0 <= code < 256 else 128 - code


def _run_here(plan: JobPlan, frames: FrameWriter, is_over: threading.Event) -> tuple[int, bytes]:
    """Runs the program as one process, the coordinator of the cluster."""
    with TemporaryFolder("stratagem-job-") as folder:
        answer = folder.path / "answer"
        command = [word.replace("{answer}", str(answer)) for word in plan.command]
        variables = {**environment.snapshot(), **plan.variables(), "TF_CONFIG": _config(plan)}
        frames.write("started", "")
        with StreamedProcess((sys.executable, *command), variables, frames.write) as process:
            while (code := process.wait(_POLL_S)) is None:
                if is_over.is_set():
                    process.end()
        return code, answer.read_bytes() if answer.exists() else b""


def _other_python(wanted: str, own: str) -> str:
    return explain(
        f"The client has Python {wanted}, but this cluster has Python {own}.",
        expected="the same version: a function is sent as compiled code.",
        fix="use the same version on both sides, or send a script with connect_to_cluster.",
    )


def _config(plan: JobPlan) -> str:
    """Returns `TF_CONFIG` of the coordinator."""
    if not plan.cluster:
        return ""
    config: dict[str, Any] = {"cluster": plan.cluster}
    if "chief" in plan.cluster:
        config["task"] = {"type": "chief", "index": 0}
    return json.dumps(config)


def _send_heartbeats(frames: FrameWriter, pause_s: float) -> None:
    while True:
        frames.write("heartbeat", "")
        time.sleep(pause_s)


def _watch_client(
    plan: JobPlan, limit_s: float, frames: FrameWriter, is_over: threading.Event
) -> None:
    """Ends the job when its client is gone."""
    watch = LeaseWatch(JobsClient(plan.url or dashboard_url()), plan.nonce, limit_s)
    while not is_over.wait(watch.pause_s):
        if watch.is_over():
            frames.write(
                "note",
                explain(
                    f"The client of this job has not responded for {limit_s:g} s.",
                    expected="a client that runs as long as its job.",
                    fix="pass stop_with_client=False for a job that continues without its client; "
                    "STRATAGEM_CLIENT_TIMEOUT_S changes the limit.",
                ),
            )
            is_over.set()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
