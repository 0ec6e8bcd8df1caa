"""Imports run downward only, siblings stay apart, and nothing below the line loads JAX.

A room is a folder of the package, or a folder in it that the table names with a dot.

A name imported under `TYPE_CHECKING` loads nothing, so the order of the layers does not bind it;
which foreign libraries a room may name does.
"""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source_tree import Import, Module, assert_none, from_text, package

# From the top to the bottom. Rooms in one layer never import each other, except in the last one.
LAYERS = (
    ("cli", "compat", "coordinator", "embedding", "nn", "tpu", "train"),
    ("estimator", "planning", "selftest"),
    ("strategies",),
    ("parameter_server",),
    ("parameter_server.strategy",),
    ("parameter_server.keras",),
    ("parameter_server.coordinator",),
    ("input.service",),
    ("parameter_server.cluster",),
    ("parameter_server.client",),
    ("keras",),
    ("keras.callbacks", "keras.evaluation"),
    ("keras.training",),
    ("keras.numerics",),
    ("keras.variables",),
    ("keras.private", "keras.json_values"),
    ("checkpoint",),
    ("strategies.base",),
    ("execution",),
    ("execution.functions",),
    ("execution.programs",),
    ("execution.eager", "execution.embeddings", "execution.late_gathers"),
    ("execution.tracing",),
    ("execution.analysis",),
    ("variables", "input", "summary"),
    ("context",),
    ("collectives",),
    ("values",),
    ("profiling", "topology"),
    # no JAX below this line
    ("monitoring",),
    ("doctor", "goodput", "remote"),
    ("elastic",),
    ("process_group", "parameter_server.server"),
    ("transport",),
    ("launch", "manifests", "migrate"),
    ("preemption", "storage", "stragglers"),
    ("run_events",),
    ("authentication",),
    ("cluster",),
    (
        "accelerators",
        "background_errors",
        "closing",
        "communication",
        "compression",
        "config",
        "environment",
        "environment_variables",
        "errors",
        "exit_codes",
        "fingerprints",
        "folders",
        "frames",
        "host_memory",
        "local_updates",
        "logs",
        "messages",
        "notebooks",
        "old_names",
        "optional_libraries",
        "options",
        "partitioners",
        "placement",
        "processor_time",
        "public_dir",
        "public_names",
        "rendering",
        "security_settings",
        "service_settings",
        "setting_kinds",
        "temporary_folders",
        "time_limits",
        "tracebacks",
    ),
)
NO_JAX_BELOW = LAYERS.index(("profiling", "topology"))
DEPTH = {room: depth for depth, layer in enumerate(LAYERS) for room in layer}
BOTTOM = len(LAYERS) - 1

# What only these rooms may import. `keras.private` is the one place for Keras's private names.
ALLOWED_ROOMS = {
    "keras": {
        "variables",
        "execution",
        "checkpoint",
        "embedding",
        "keras",
        "parameter_server",
        "estimator",
        "selftest",
    },
    "ray": {"parameter_server", "launch", "remote"},
    "orbax": {"storage"},
}
LOADS_JAX = {"jax", "jaxlib", "keras", "optax", "flax", "orbax", "grain"}
# They may import our own package inside a function, so that `import stratagem` and `--help` stay
# fast; "" is the package's own `__init__`.
LAZY_ROOMS = ("", "cli", "compat")
# Where private names are listed, each with the reason why it is used.
PRIVATE_ROOMS = ("stratagem.keras.private", "stratagem.topology.private")
# Packages that an installation may lack: those of pyproject.toml's extras, and what users bring.
OPTIONAL = {
    "grain",
    "kubernetes",
    "matplotlib",
    "opentelemetry",
    "orbax",
    "prometheus_client",
    "pyarrow",
    "ray",
    "tensorboard",
    "tensorflow",
    "torch",
    "zstandard",
}

# Imports that functions of the launcher make, because they load JAX or need `sys.path` set first.
LAZY_IN_LAUNCH = {
    "stratagem.launch.prefork.server_program": {"stratagem.topology.processes"},
    "stratagem.launch.tasks.function_task": {
        "stratagem.messages",
        "stratagem.optional_libraries",
    },
}

# Run as programs of their own, and written as a user would.
USER_PROGRAMS = ("stratagem.selftest.measurements", "stratagem.selftest.program")


def is_lazy_in_launch(module: Module, imported: Import) -> bool:
    return imported.in_function and imported.module in LAZY_IN_LAUNCH.get(module.name, ())


def is_user_program(module: Module, room: str | None) -> bool:
    return room == "" and module.name in USER_PROGRAMS


def our_room(imported: Import) -> str | None:
    """The room that an import reaches into; "" for the package's root; None for other packages."""
    parts = imported.full_name.split(".")
    if parts[0] != "stratagem":
        return None
    if (room := innermost_room(imported.full_name)) is not None:
        return room
    return "" if len(parts) == 1 or imported.module == "stratagem" else parts[1]


def innermost_room(name: str) -> str | None:
    """The room of the table that a module, or a name in it, is in."""
    parts = name.split(".")[1:]
    rooms = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((room for room in rooms if room in DEPTH), None)


def upward_or_sideways(module: Module) -> list[str]:
    if module.room in ("", "__main__"):
        return []
    own_room = innermost_room(module.name)
    if own_room is None:
        return [f"{module.at(1)}: room {module.room!r} is not in the table of layers"]
    violations = []
    for imported in module.imports:
        room = our_room(imported)
        if room is None or room == own_room or imported.for_types_only:
            continue
        if room == "" and imported.in_function and module.room in LAZY_ROOMS:
            continue  # the lazy root
        if is_lazy_in_launch(module, imported) or is_user_program(module, room):
            continue
        where = f"{module.at(imported.line)}: {own_room} imports {imported.full_name}"
        if room not in DEPTH:
            violations.append(f"{where}, which is in no room")
        elif DEPTH[room] < DEPTH[own_room]:
            violations.append(f"{where}, which is above it")
        elif DEPTH[room] == DEPTH[own_room] != BOTTOM:
            violations.append(f"{where}, which is its sibling")
    return violations


def jax_below_the_line(module: Module) -> list[str]:
    if module.room and DEPTH.get(innermost_room(module.name) or "", 0) <= NO_JAX_BELOW:
        return []
    loaded = [
        imported
        for imported in module.imports
        if not imported.for_types_only and imported.module.split(".")[0] in LOADS_JAX
    ]
    violations = [f"{module.at(imported.line)}: imports {imported.module}" for imported in loaded]
    if module.room == "":
        violations += [
            f"{module.at(imported.line)}: the root loads {imported.full_name}, which loads JAX"
            for imported in module.imports
            if not imported.for_types_only
            and not imported.in_function
            and DEPTH.get(our_room(imported) or "", BOTTOM) <= NO_JAX_BELOW
        ]
    return violations


def foreign_in_the_wrong_room(module: Module) -> list[str]:
    violations = []
    for imported in module.imports:
        top = imported.module.split(".")[0]
        allowed = ALLOWED_ROOMS.get(top)
        if allowed is not None and module.room not in allowed:
            violations.append(
                f"{module.at(imported.line)}: only {sorted(allowed)} may import {top}"
            )
    return violations


def private_foreign_names(module: Module) -> list[str]:
    """Names with a leading underscore, and `keras.src`, of any package but ours.

    `os._exit` is documented in spite of its name.
    """
    if module.name.startswith(PRIVATE_ROOMS):
        return []
    used = [(imported.line, imported.full_name) for imported in module.imports]
    packages = {name.split(".")[0] for _, name in used}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.split(".")[0] in packages and name.replace(".", "").isidentifier():
                used.append((node.lineno, name))
    return sorted(
        f"{module.at(line)}: {name} is private"
        for line, name in set(used)
        if not name.startswith(("stratagem", "__future__", "."))
        and name != "os._exit"
        and (
            name.startswith("keras.src")
            or any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
        )
    )


def imports_inside_functions(module: Module) -> list[str]:
    allowed = OPTIONAL | {"stratagem"} if module.room in LAZY_ROOMS else OPTIONAL
    return [
        f"{module.at(imported.line)}: {imported.full_name} is imported inside a function"
        for imported in module.imports
        if imported.in_function
        and imported.module.split(".")[0] not in allowed
        and not is_lazy_in_launch(module, imported)
    ]


def relative_imports(module: Module) -> list[str]:
    return [
        f"{module.at(imported.line)}: {imported.full_name} is relative"
        for imported in module.imports
        if imported.module.startswith(".")
    ]


def cycles(modules: list[Module]) -> list[str]:
    """Modules that import each other at run time; a package counts as its `__init__`."""
    names = {module.name for module in modules}
    needs = {module.name: _needed_modules(module, names) for module in modules}
    while True:
        leaves = {name for name, needed in needs.items() if not needed & needs.keys()}
        if not leaves:
            return sorted(needs)
        needs = {name: needed for name, needed in needs.items() if name not in leaves}


def _needed_modules(module: Module, names: set[str]) -> set[str]:
    """`from a import b` needs `a.b` where that is a module, and `a` where b is a name in it."""
    needed = set()
    for imported in module.imports:
        if not imported.for_types_only:
            is_module = imported.full_name in names
            needed.add(imported.full_name if is_module else imported.module)
    return needed & names


RULES = (
    upward_or_sideways,
    jax_below_the_line,
    foreign_in_the_wrong_room,
    private_foreign_names,
    imports_inside_functions,
    relative_imports,
)

# Rule, module, text: each must be found.
BAD = [
    (upward_or_sideways, "stratagem.values.x", "from stratagem.context import stack"),
    (upward_or_sideways, "stratagem.values.x", "import stratagem.keras.training.model"),
    (upward_or_sideways, "stratagem.values.x", "import stratagem"),
    (upward_or_sideways, "stratagem.variables.x", "from stratagem.input import dataset"),
    (upward_or_sideways, "stratagem.cluster.x", "if True:\n    from stratagem import launch"),
    (upward_or_sideways, "stratagem.extras.x", ""),
    (upward_or_sideways, "stratagem.execution.tracing.x", "import stratagem.execution.programs.y"),
    (upward_or_sideways, "stratagem.execution.eager.x", "import stratagem.execution.embeddings.y"),
    (upward_or_sideways, "stratagem.execution.eager.x", "from stratagem.execution import function"),
    (jax_below_the_line, "stratagem.cluster.x", "import jax.numpy as jnp"),
    (jax_below_the_line, "stratagem.options", "def f():\n    import keras"),
    (jax_below_the_line, "stratagem.parameter_server.server.x", "import jax"),
    (upward_or_sideways, "stratagem.keras.x", "import stratagem.parameter_server.client.y"),
    (upward_or_sideways, "stratagem.strategies.base.x", "import stratagem.strategies.mirrored"),
    (jax_below_the_line, "stratagem", "from stratagem.strategies import mirrored"),
    (foreign_in_the_wrong_room, "stratagem.values.x", "from keras import ops"),
    (foreign_in_the_wrong_room, "stratagem.values.x", "import ray"),
    (private_foreign_names, "stratagem.values.x", "from jax._src import core"),
    (private_foreign_names, "stratagem.values.x", "import jax\njax._src.core.Tracer"),
    (private_foreign_names, "stratagem.keras.x", "from keras.src import backend"),
    (imports_inside_functions, "stratagem.values.x", "def f():\n    if 1:\n        import json"),
    (
        imports_inside_functions,
        "stratagem.launch.tasks.function_task",
        "def f():\n    import stratagem.errors",
    ),
    (
        upward_or_sideways,
        "stratagem.launch.prefork.server_program",
        "from stratagem.topology.processes import has_started",
    ),
    (imports_inside_functions, "stratagem.cli.x", "def f():\n    import json"),
    (
        imports_inside_functions,
        "stratagem.values.x",
        "def f():\n    from stratagem import topology",
    ),
    (upward_or_sideways, "stratagem.cli", "import stratagem"),
    (upward_or_sideways, "stratagem.values.x", "def f():\n    import stratagem"),
    (relative_imports, "stratagem.values.x", "from . import regrouping"),
]

GOOD = """
from __future__ import annotations
from typing import TYPE_CHECKING
import jax
from stratagem.errors import InvalidArgumentError
from stratagem.topology import mesh
from stratagem.values import distributed
if TYPE_CHECKING:
    from stratagem.strategies.strategy import Strategy
def plot():
    import matplotlib.pyplot
"""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule) -> None:
    assert_none([violation for module in package() for violation in rule(module)])


@pytest.mark.parametrize(("rule", "name", "text"), BAD)
def test_rule_finds_a_violation(rule, name, text) -> None:
    assert rule(from_text(text, name))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_accepts_a_module_that_keeps_it(rule) -> None:
    assert rule(from_text(GOOD, "stratagem.values.x")) == []


@pytest.mark.every_combination
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", ["stratagem", "stratagem.cli.x", "stratagem.compat.x"])
def test_lazy_rooms_may_import_the_package_inside_a_function(rule, name) -> None:
    text = "def f():\n    import stratagem\n    from stratagem import planning\n"
    assert rule(from_text(text, name)) == []


def test_package_has_no_import_cycle() -> None:
    assert_none(cycles(package()))


def test_import_cycle_is_found() -> None:
    first = from_text("from stratagem.values import b", "stratagem.values.a")
    second = from_text("from stratagem.values.c import f", "stratagem.values.b")
    third = from_text("import stratagem.values.a", "stratagem.values.c")
    assert cycles([first, second, third]) == [module.name for module in (first, second, third)]
    assert cycles([first, second]) == []
