"""What a fresh process loads: no JAX and no Keras before something needs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HEAVY = {
    "jax",
    "jaxlib",
    "keras",
    "tensorflow",
    "torch",
    "ray",
    "matplotlib",
    "jinja2",
    "yaml",
    "kubernetes_validate",
    "libcst",
    "prometheus_client",
}
LIGHT_STATEMENTS = [
    "import stratagem",
    "import stratagem.errors, stratagem.options, stratagem.environment",
    "import stratagem as sg; sg.TerminationConfig(); sg.preemption.SignalSource()",
    "import stratagem as sg; sg.ClusterSpec({}); sg.cluster.detect(); sg.cluster_resolver",
    *(
        f"import stratagem.{name}"
        for name in (
            "checkpoint.storage.process_main",
            "cluster",
            "cluster.preemption",
            "cli.manifests",
            "cli.migrate",
            "launch",
            "launch.remote",
            "observe.goodput",
            "observe.run_state",
            "observe.terminal",
        )
    ),
    "from stratagem.cli import main; main(['--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['--version'], standalone_mode=False)",
    "from stratagem.cli import main; main(['devices', '--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['launch', '--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['config', '-q'], standalone_mode=False)",
    "from stratagem.cli import main; main(['goodput', '--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['watch', '--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['server', '--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['plan', '--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['kubernetes', 'render', '-h'], standalone_mode=False)",
    "from stratagem.cli import main; main(['migrate', '--help'], standalone_mode=False)",
]


_PROGRAM = """
import contextlib, io, sys
for statement in {statements!r}:
    with contextlib.redirect_stdout(io.StringIO()):
        exec(statement, {{}})
    loaded = {heavy!r} & set(sys.modules)
    if loaded:
        sys.exit(f"{{statement}} loads {{sorted(loaded)}}")
"""


def first_that_is_heavy(statements: Sequence[str], folder: Path, heavy: set[str] = HEAVY) -> str:
    """Runs statements in a fresh interpreter; says which one loads what it should not."""
    program = _PROGRAM.format(statements=statements, heavy=heavy)
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=folder,
    )
    return process.stderr


def test_nothing_heavy_is_loaded(tmp_path) -> None:
    assert first_that_is_heavy(LIGHT_STATEMENTS, tmp_path) == ""


def test_the_root_draws_no_tables(tmp_path) -> None:
    heavy = {*HEAVY, "rich", "click", "numpy"}
    assert first_that_is_heavy(["import stratagem"], tmp_path, heavy) == ""


def test_heavy_import_is_found(tmp_path) -> None:
    (tmp_path / "jax.py").write_text("")
    (tmp_path / "light.py").write_text("")
    (tmp_path / "heavy.py").write_text("import jax\n")
    told = first_that_is_heavy(["import light", "import heavy"], tmp_path)
    assert told == "import heavy loads ['jax']\n"
