"""Completion lists public names, and hides nothing from code."""

from __future__ import annotations

import pickle
from pathlib import Path

import jax
import numpy as np
import pytest

import stratagem as sg
from stratagem.logs import PublicDir

_LISTING = Path(__file__).parent / "architecture" / "public_api.txt"
# The parts of a strategy, for authors of libraries: docs/libraries/new_strategy.md.
_PARTS = {"cross_device_ops", "executor", "placement", "topology", "variables"}


def _listed(owner: str) -> set[str]:
    """Public members of a class by the listing, without operators."""
    lines = _LISTING.read_text(encoding="utf-8").splitlines()
    names = {line.split("(")[0].strip() for line in lines if line.startswith(f"{owner}.")}
    members = {name.removeprefix(f"{owner}.") for name in names}
    return {name for name in members if not name.startswith("_")}


def test_package_lists_its_public_names() -> None:
    lines = _LISTING.read_text(encoding="utf-8").splitlines()
    tops = {line.removeprefix("sg.").split("(")[0].split()[0].split(".")[0] for line in lines}
    assert set(dir(sg)) == tops == set(sg.__all__)
    assert sg.__version__  # hidden, and still there


@pytest.mark.parametrize(
    ("make", "owner", "more"),
    [
        (lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]), "sg.MirroredStrategy", _PARTS),
        (lambda: sg.OneDeviceStrategy("cpu:0"), "sg.OneDeviceStrategy", _PARTS),
        (lambda: sg.PerReplica(objects=(1, 2)), "sg.PerReplica", set()),
        (lambda: sg.Mirrored(jax.numpy.ones(2)), "sg.Mirrored", {"value"}),
        (lambda: sg.ClusterSpec({"worker": ["a:1"]}), "sg.ClusterSpec", set()),
        (
            sg.cluster_resolver.TFConfigClusterResolver,
            "sg.cluster_resolver.TFConfigClusterResolver",
            set(),
        ),
    ],
    ids=["mirrored", "one device", "per replica", "mirrored value", "spec", "resolver"],
)
def test_object_lists_the_public_names_of_its_class(make, owner, more) -> None:
    value = make()
    assert set(dir(value)) == _listed(owner) | more
    assert all(hasattr(value, name) for name in dir(value))
    assert not any(name.startswith("_") for name in dir(value))


def test_hidden_names_can_be_read() -> None:
    class Base(PublicDir):
        shown = 1
        _hidden = 2

    class Made(Base):
        def __init__(self) -> None:
            self.own, self._own = 3, 4

    made = Made()
    assert dir(made) == ["own", "shown"]
    assert (made._hidden, made._own, getattr(made, "missing", 5)) == (2, 4, 5)


def test_values_are_copied_as_before() -> None:
    value = pickle.loads(pickle.dumps(sg.PerReplica(objects=(np.int32(1), 2))))
    assert value.objects == (1, 2)
