"""Subrooms import downward only, and leave the top level of their room alone."""

from __future__ import annotations

import pytest

from tests.architecture.source_tree import Module, assert_none, from_text, package

# By room, its subrooms from the top to the bottom. Other modules of the room are above them all.
SUBROOMS = {
    "launch": ("nodes", "restart", "prefork", "tasks", "plan"),
    "remote": ("jobs", "ray"),
}


def depth(room: str, name: str) -> int:
    """Returns the layer of a module in its room; -1 for the top level."""
    part = [*name.split("."), "", ""][2]
    return SUBROOMS[room].index(part) if part in SUBROOMS[room] else -1


def upward_in_room(module: Module) -> list[str]:
    if module.room not in SUBROOMS:
        return []
    prefix = f"stratagem.{module.room}"
    return [
        f"{module.at(imported.line)}: {module.name} imports {imported.full_name}, which is above it"
        for imported in module.imports
        if not imported.for_types_only
        and f"{imported.full_name}.".startswith(f"{prefix}.")
        and depth(module.room, imported.full_name) < depth(module.room, module.name)
    ]


def test_subrooms_import_downward_only() -> None:
    assert_none([violation for module in package() for violation in upward_in_room(module)])


@pytest.mark.parametrize(
    ("name", "text", "is_allowed"),
    [
        ("stratagem.launch.plan.task_plan.x", "from stratagem.launch.tasks import command", False),
        ("stratagem.launch.tasks.output.x", "import stratagem.launch.restart.policy", False),
        ("stratagem.remote.ray.x", "from stratagem.remote.jobs.lease import Lease", False),
        ("stratagem.remote.jobs.jobs_client.x", "from stratagem.remote import server", False),
        ("stratagem.launch.x", "from stratagem.launch.restart import policy", True),
        ("stratagem.launch.restart.x", "from stratagem.launch.plan.task_plan import ports", True),
        ("stratagem.launch.tasks.x", "from stratagem.launch.tasks.output import screen", True),
        ("stratagem.remote.ray.x", "import ray", True),
    ],
)
def test_upward_import_is_found(name, text, is_allowed) -> None:
    assert (upward_in_room(from_text(text, name)) == []) is is_allowed


def test_subrooms_exist() -> None:
    names = {module.name for module in package()}
    assert {f"stratagem.{room}.{one}" for room, inner in SUBROOMS.items() for one in inner} <= names
