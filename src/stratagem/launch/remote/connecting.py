"""`connect_to_cluster`: moves the running script to a cluster of servers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Unpack

from stratagem import environment
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.spec import ClusterDef, ClusterSpec
from stratagem.launch.remote.jobs.job_plan import JOB_VARIABLE
from stratagem.launch.remote.remote_cluster import RemoteArguments, RemoteCluster
from stratagem.launch.tasks.exit_status import exit_code
from stratagem.messages import explain


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
    _check_old(job_name, task_index, protocol, cluster_device_filters)
    cluster = RemoteCluster(cluster_spec_or_resolver, **options)
    main = sys.modules["__main__"]
    module = getattr(getattr(main, "__spec__", None), "name", None)
    code = cluster.run_script(_script_of(main), sys.argv[1:], module=module)
    sys.exit(exit_code(code))


def _script_of(main: ModuleType) -> str:
    script = getattr(main, "__file__", None)
    if script is None:
        raise RuntimeError(
            explain(
                "There is no script to send: this is an interactive session.",
                expected="a program in a file.",
                fix="save it, or send a function: sg.remote.RemoteCluster(...).run(train).",
            )
        )
    return script


def _check_old(job_name: str, task_index: int, protocol: str | None, filters: object) -> None:
    values = (job_name, task_index, protocol, filters)
    if values[:2] != ("localhost", 0) or protocol not in (None, "grpc") or filters is not None:
        raise ValueError(
            explain(
                f"job_name, task_index, protocol and cluster_device_filters are {values!r}.",
                expected='"localhost", 0, None or "grpc", and None: this program is not a task.',
                fix="omit them; tasks of the cluster run `stratagem server`.",
            )
        )
