"""What a fresh process loads: no JAX and no Keras before something needs them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
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
)
LIGHT_STATEMENTS = [
    "import stratagem",
    "import stratagem.errors, stratagem.options, stratagem.environment",
    "import stratagem as sg; sg.TerminationConfig(); sg.preemption.SignalSource()",
    "import stratagem as sg; sg.ClusterSpec({}); sg.cluster.detect(); sg.cluster_resolver",
    # Rooms below the line, as they come.
    *(
        f"import {name}"
        for name in (
            "stratagem.cluster",
            "stratagem.observe.goodput",
            "stratagem.launch",
            "stratagem.cli.manifests",
            "stratagem.cli.migrate",
            "stratagem.observe.monitoring",
            "stratagem.cluster.preemption",
            "stratagem.launch.remote",
        )
        if importlib.util.find_spec(name) is not None
    ),
    "from stratagem.cli import main; main(['--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['--version'], standalone_mode=False)",
    "from stratagem.cli import main; main(['devices', '--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['launch', '--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['config', '--show', '-q'], standalone_mode=False)",
    "from stratagem.cli import main; main(['completion', 'zsh'], standalone_mode=False)",
    "from stratagem.cli import main; main(['goodput', '--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['watch', '--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['server', '--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['plan', '--help'], standalone_mode=False)",
    "from stratagem.cli import main; main(['kubernetes', 'render', '-h'], standalone_mode=False)",
    "from stratagem.cli import main; main(['migrate', '--help'], standalone_mode=False)",
]


def heavy_modules(statement: str, folder: Path | None = None) -> set[str]:
    """Runs a statement in a fresh interpreter and returns which heavy packages it has loaded."""
    report = f"import sys; print('loaded', *(set({HEAVY!r}) & set(sys.modules)))"
    process = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{report}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=folder,
    )
    return set(process.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("statement", LIGHT_STATEMENTS)
def test_statement_loads_nothing_heavy(statement) -> None:
    assert heavy_modules(statement) == set()


def test_heavy_import_is_found(tmp_path) -> None:
    (tmp_path / "jax.py").write_text("")
    (tmp_path / "room.py").write_text("import jax\n")
    assert heavy_modules("import room", tmp_path) == {"jax"}
