"""Programs before and after, for the tests of each pass."""

from __future__ import annotations

import ast
import textwrap

from stratagem.cli.migrate.files import rewrite

SG = "import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend\n"


def rewritten(before: str) -> str:
    """The program after the tool, which parses, and which a second run leaves as it is."""
    after = rewrite(textwrap.dedent(before))
    ast.parse(after)
    assert rewrite(after) == after
    return after


def body(before: str) -> str:
    """What becomes of statements below `import tensorflow as tf`, without imports."""
    statements = textwrap.dedent(before).lstrip("\n")
    after = rewritten(f"import tensorflow as tf\n{statements}")
    lines = after.splitlines(keepends=True)
    roots = ("import stratagem", "import keras", "import jax", "import numpy", "import tensorflow")
    while lines and lines[0].startswith((*roots, "import os", "import shutil")):
        del lines[0]
    return "".join(lines)


def same(before: str, after: str) -> None:
    """Compares what becomes of statements with what is expected."""
    found, expected = body(before), textwrap.dedent(after).lstrip("\n")
    assert found == expected, f"{found}\n--- is not ---\n{expected}"
