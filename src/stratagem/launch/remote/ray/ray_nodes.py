"""Nodes of a Ray cluster formed by the tasks of `TF_CONFIG`: the leader's head, and the others.

The machine of each task has a resource named after the task, so that Ray starts each process on its
machine.
"""

from __future__ import annotations

import json
import os
import sys
import time

from stratagem import environment, settings
from stratagem.cluster.addresses import free_ports, ip_address, split_address
from stratagem.errors import UnavailableError, explain
from stratagem.launch.remote.ray.node_process import RayNode
from stratagem.launch.remote.ray.ray_cluster import (
    OBJECT_STORE_BYTES,
    has_token,
    load_ray,
    quiet_settings,
    wait_for_head,
)

_RAY_FOLDER = "/tmp/ray"  # noqa: S108 - Ray's own folder, as Ray names it


def resource_of_task(task_type: str, task_index: int) -> str:
    """Returns the name of the resource that only a task's machine has, such as "ps:0"."""
    return f"{task_type}:{task_index}"


def expect_token() -> None:
    """Configures this process for a cluster with a token; RuntimeError if Ray is imported."""
    if environment.lookup("RAY_AUTH_MODE") is None and "ray" in sys.modules:
        raise RuntimeError(
            explain(
                "Ray was imported before RAY_AUTH_MODE was set, so it ignores the cluster's token.",
                expected="RAY_AUTH_MODE=token before `import ray`.",
                fix="set it for the whole program, or import ray later.",
                code="SG513",
            )
        )
    environment.set_defaults({"RAY_AUTH_MODE": "token", **quiet_settings()})


def start_head(
    address: str,
    *,
    task_type: str = "chief",
    task_index: int = 0,
    jobs_port: int | None = None,
    timeout_s: float | None = None,
) -> RayNode:
    """Starts the head of a Ray cluster on this machine. Connect with `start_local_ray`.

    All tasks need the same token, in `RAY_AUTH_TOKEN` or in the file of `RAY_AUTH_TOKEN_PATH`. On a
    private network, `RAY_AUTH_MODE=disabled` works without one. Ray listens at `address`
    (host:port), for jobs of clients at `jobs_port` if given, and must start within `timeout_s`,
    `STRATAGEM_JOIN_TIMEOUT_S` if None.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: there is no token, or Ray was imported before it was configured.
        UnavailableError: the host is unknown, or Ray does not start.
        DeadlineExceededError: Ray does not start in time.
        ValueError: the address is invalid.
    """
    host, port = split_address(address)
    _require_token()
    expect_token()
    load_ray()
    options = [
        "--head",
        f"--port={port}",
        *_dashboard(jobs_port),
        # Unused, but required; the default port may be in use by another head.
        f"--ray-client-server-port={free_ports(1)[0]}",
        *_options(host, task_type, task_index),
    ]
    deadline_s = time.monotonic() + _limit_s(timeout_s)
    node = RayNode(options, address, dashboard_port=jobs_port)
    if (lines := _failed_start(node, deadline_s)) is None:
        return node
    raise UnavailableError(
        explain(
            f"The head of the Ray cluster cannot start at {address}: {lines}",
            expected="an address of this machine with a free port, and time to start Ray.",
            fix="correct the address of this task in TF_CONFIG. If Ray timed out, this machine is "
            "overloaded: try again.",
        )
    )


def join_as_node(
    head_address: str,
    task_type: str,
    task_index: int,
    *,
    host: str | None = None,
    timeout_s: float | None = None,
) -> RayNode:
    """Waits for the head of a Ray cluster and joins it with this machine.

    None for `host` means the address from which this machine reaches the head, for `timeout_s`
    `STRATAGEM_JOIN_TIMEOUT_S`. Raises the errors of `start_head`; UnavailableError also if the head
    refuses this machine.
    """
    split_address(head_address)
    _require_token()
    load_ray()
    limit_s = _limit_s(timeout_s)
    deadline_s = time.monotonic() + limit_s
    wait_for_head(head_address, f"{task_type} {task_index}", limit_s)
    options = [
        f"--address={head_address}",
        # A separate folder, as tasks on one machine would use the same names for their sockets.
        f"--temp-dir={_RAY_FOLDER}/{task_type}-{task_index}-{os.getpid()}",
        *_options(host, task_type, task_index),
    ]
    while (lines := _failed_start(node := RayNode(options, head_address), deadline_s)) is not None:
        if time.monotonic() > deadline_s or "token" in lines.lower():
            raise UnavailableError(
                explain(
                    f"{task_type} {task_index} cannot join the Ray cluster at {head_address}: "
                    f"{lines}",
                    expected="a leader that accepts this machine.",
                    fix="give all tasks the same RAY_AUTH_TOKEN and the same version of Ray.",
                    code="SG513",
                )
            )
    return node


def _failed_start(node: RayNode, deadline_s: float) -> str | None:
    """Waits for the start of a node; returns its last lines if it failed, else None."""
    try:
        if node.wait_for_start(deadline_s):
            return None
        lines = node.last_lines()
    except BaseException:
        node.close()
        raise
    node.close()
    return lines


def _dashboard(jobs_port: int | None) -> list[str]:
    """Returns the options of Ray's dashboard, which accepts jobs and requires the token."""
    if jobs_port is None:
        return ["--include-dashboard=false"]
    # All interfaces: a forwarded port arrives at the loopback address.
    return ["--include-dashboard=true", "--dashboard-host=0.0.0.0", f"--dashboard-port={jobs_port}"]


def _options(host: str | None, task_type: str, task_index: int) -> list[str]:
    resources = {resource_of_task(task_type, task_index): 1}
    options = [
        "--disable-usage-stats",
        "--dashboard-agent-listen-port=0",  # several nodes may share a machine
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--resources={json.dumps(resources)}",
    ]
    if host is not None:
        options.append(f"--node-ip-address={_ip_address(host, task_type, task_index)}")
    return options


def _ip_address(host: str, task_type: str, task_index: int) -> str:
    try:
        return ip_address(host)
    except OSError as error:
        raise UnavailableError(
            explain(
                f"The host {host!r} of {task_type} {task_index} is unknown on this machine: "
                f"{error}",
                expected="a name or an IP address that all tasks of the cluster can resolve.",
                fix=f"correct the address of {task_type} {task_index} in TF_CONFIG, or in the "
                "cluster_spec of the resolver.",
            )
        ) from error


def _limit_s(timeout_s: float | None) -> float:
    return float(settings.read("join_timeout_s")) if timeout_s is None else timeout_s


def _require_token() -> None:
    if has_token() or environment.lookup("RAY_AUTH_MODE") == "disabled":
        return
    raise RuntimeError(
        explain(
            "This task has no token for the Ray cluster, and without one any client could run "
            "programs there.",
            expected="the same secret text in RAY_AUTH_TOKEN of all tasks.",
            fix="set it, for example to the output of `openssl rand -hex 32`; or set "
            "RAY_AUTH_MODE=disabled to run without a token.",
            code="SG513",
        )
    )
