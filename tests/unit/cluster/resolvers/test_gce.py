"""Instance groups from a fake compute API."""

from __future__ import annotations

import sys

import pytest

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.gce import GCEClusterResolver


class _Request:
    def __init__(self, response: dict) -> None:
        self.response = response

    def execute(self) -> dict:
        return self.response


class _Compute:
    """A fake of the compute API, with a page per list of instances."""

    def __init__(self, *pages: dict[str, str]) -> None:
        self.pages = pages
        self.asked: list[dict] = []

    def instanceGroups(self) -> _Compute:  # noqa: N802
        return self

    def instances(self) -> _Compute:
        return self

    def listInstances(  # noqa: N802
        self,
        *,
        project: str,
        zone: str,
        instanceGroup: str,  # noqa: N803
        body: dict,
        orderBy: str,  # noqa: N803
    ) -> _Request:
        self.asked.append({"group": f"{project}/{zone}/{instanceGroup}", **body, "by": orderBy})
        return self._page(0)

    def listInstances_next(  # noqa: N802
        self, *, previous_request: _Request, previous_response: dict
    ) -> _Request | None:
        assert previous_request.response is previous_response
        number = previous_response["number"] + 1
        return self._page(number) if number < len(self.pages) else None

    def get(self, *, project: str, zone: str, instance: str) -> _Request:
        (address,) = (page[instance] for page in self.pages if instance in page)
        return _Request({"networkInterfaces": [{"networkIP": address}]})

    def _page(self, number: int) -> _Request:
        url = "https://www.googleapis.com/compute/v1/projects/p/zones/z/instances/"
        items = [{"instance": f"{url}{name}"} for name in self.pages[number]]
        return _Request({"number": number, **({"items": items} if items else {})})


def test_running_instances_of_all_pages_are_sorted() -> None:
    service = _Compute({"b": "10.0.0.2", "a": "10.0.0.3"}, {}, {"c": "10.0.0.1"})
    resolver = GCEClusterResolver("p", "z", "g", 8470, task_id="2", service=service)
    assert resolver.cluster_spec() == {"worker": [f"10.0.0.{n}:8470" for n in (1, 2, 3)]}
    assert service.asked == [{"group": "p/z/g", "instanceState": "RUNNING", "by": "name"}]
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 2, "grpc")
    assert resolver.master() == "grpc://10.0.0.3:8470"
    assert resolver.master("worker", 0, "http") == "http://10.0.0.1:8470"
    assert resolver.processes() == Processes(3, 2, "10.0.0.1:8470")


def test_instances_have_the_type_they_are_given() -> None:
    service = _Compute({"a": "10.0.0.1"})
    resolver = GCEClusterResolver("p", "z", "g", 1, "ps", rpc_layer=None, service=service)
    assert resolver.cluster_spec() == {"ps": ["10.0.0.1:1"]}
    assert resolver.master() == "10.0.0.1:1"
    resolver.task_id = 3
    assert resolver.task_id == 3
    with pytest.raises(RuntimeError, match="task_type='worker' was set on a GCEClusterResolver"):
        resolver.task_type = "worker"


def test_group_without_running_instances_is_an_error() -> None:
    resolver = GCEClusterResolver("p", "z", "g", 1, service=_Compute({}))
    with pytest.raises(RuntimeError, match="No instance of group 'g' in p/z is running"):
        resolver.cluster_spec()


def test_library_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", None)
    with pytest.raises(ImportError, match=r"GCEClusterResolver needs googleapiclient.discovery"):
        GCEClusterResolver("p", "z", "g", 1)
