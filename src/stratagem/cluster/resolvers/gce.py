"""Resolver for a Google Compute Engine instance group, and the clients for Google Cloud."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

from stratagem import environment
from stratagem.cluster.addresses import join_address
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.spec import ClusterSpec, parse_task_index
from stratagem.environment import load
from stratagem.errors import explain

# Clients for Google Cloud's APIs and for the metadata server of its machines.


_TIMEOUT_S = 10
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_INSTALL = "google-api-python-client google-auth"


def build_service(
    api: str, credentials: object, *, needed_by: str, discovery_url: str | None = None
) -> Any:
    """Returns a client of version 1 of a Google Cloud API ("compute" or "tpu").

    `credentials` come from `google.auth`, or are "default" for the environment's. Raises
    ImportError without Google's libraries.
    """
    discovery = load("googleapiclient.discovery", needed_by=needed_by, install=_INSTALL)
    if credentials is None or credentials == "default":
        auth = load("google.auth", needed_by=needed_by, install=_INSTALL)
        credentials, _ = auth.default(scopes=[_SCOPE])
    options = {} if discovery_url is None else {"discoveryServiceUrl": discovery_url}
    return discovery.build(api, "v1", credentials=credentials, cache_discovery=False, **options)


def metadata(path: str, *, instead: str) -> str:
    """Returns a text from the metadata server, with a path below `computeMetadata/v1/`.

    Raises RuntimeError, which suggests the argument `instead`, if the server does not answer.
    """
    host = (
        environment.lookup("GCE_METADATA_HOST")
        or environment.lookup("GCE_METADATA_IP")
        or "metadata.google.internal"
    )
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310 - http
            return response.read().decode()
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it keeps its connection open, and a caller may keep the error
        raise RuntimeError(
            explain(
                f"The metadata server {host} did not return {path!r}: {error}",
                expected="a Google Cloud machine.",
                fix=f"pass {instead}.",
            )
        ) from error


# Resolver for the instances of a Google Compute Engine instance group.


class GCEClusterResolver(ClusterResolver):
    """Lists the running instances of an instance group; all have the same task type.

    It cannot find out which of them is this machine: pass `task_id`, the position of its address in
    the sorted list.

    Args:
        project: name of the project.
        zone: zone of the group.
        instance_group: name of the group.
        port: port of every task.
        task_type: type of every task.
        task_id: index of this process.
        rpc_layer: prefix of addresses.
        credentials: credentials from `google.auth`, or "default" for the environment's.
        service: client of the compute API, which needs no credentials then.

    Raises:
        ImportError: no service is passed, and Google's libraries are not installed.

    Example:
        >>> from unittest import mock
        >>> service = mock.MagicMock()  # in place of the client of Google's compute API
        >>> groups, instances = service.instanceGroups(), service.instances()
        >>> groups.listInstances().execute.return_value = {"items": [{"instance": "zones/z/vm-0"}]}
        >>> groups.listInstances_next.return_value = None
        >>> vm = {"networkInterfaces": [{"networkIP": "10.0.0.2"}]}
        >>> instances.get().execute.return_value = vm
        >>> resolver = sg.cluster_resolver.GCEClusterResolver(
        ...     "my-project", "us-west1-a", "my-group", port=8470, service=service)
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['10.0.0.2:8470']})

    Source: TF 2.21 gce_cluster_resolver.py, GCEClusterResolver.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int | str = 0,
        rpc_layer: str | None = "grpc",
        credentials: object = "default",
        service: Any = None,
    ) -> None:
        self._project = project
        self._zone = zone
        self._instance_group = instance_group
        self._port = port
        self._task_type = task_type
        self._task_id = parse_task_index(task_id)
        self._rpc_layer = rpc_layer
        self._service = service or build_service(
            "compute", credentials, needed_by="GCEClusterResolver"
        )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the sorted addresses of the running instances, from a request to the API.

        Returns:
            The cluster.

        Raises:
            RuntimeError: no instance of the group is running.
        """
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            project=self._project,
            zone=self._zone,
            instanceGroup=self._instance_group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        addresses: list[str] = []
        while request is not None:
            response = request.execute()
            # A page without instances lacks the key.
            for item in response.get("items", []):
                addresses.append(self._address(item["instance"].split("/")[-1]))
            request = groups.listInstances_next(
                previous_request=request, previous_response=response
            )
        if not addresses:
            raise RuntimeError(
                explain(
                    f"No instance of group {self._instance_group!r} in {self._project}/"
                    f"{self._zone} is running.",
                    expected="the machines of the cluster.",
                    fix="start the instances, or correct project, zone and instance_group.",
                )
            )
        return ClusterSpec({self._task_type or "worker": sorted(addresses)})

    @property
    def task_type(self) -> str | None:
        """Type of all tasks; read-only."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            explain(
                f"task_type={task_type!r} was set on a GCEClusterResolver created with "
                f"{self._task_type!r}.",
                expected="the original type, which also names its job.",
                fix="create another resolver with this task_type.",
            )
        )

    def _address(self, instance: str) -> str:
        details = (
            self._service.instances()
            .get(project=self._project, zone=self._zone, instance=instance)
            .execute()
        )
        return join_address(details["networkInterfaces"][0]["networkIP"], self._port)
