"""The script that renders a template does what the command does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from stratagem.cli.manifests.rendering import kubernetes_template, render_kubernetes

_FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_FOLDER / "render_template.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_template_is_rendered(tmp_path) -> None:
    path = tmp_path / "template.yaml.jinja"
    path.write_text(kubernetes_template().replace("worker_replicas = 2", "worker_replicas = 3"))
    result = _run(str(path))
    assert (result.returncode, result.stderr) == (0, "")
    random_secret = re.compile(r"(?<=secret: )[0-9a-f]{64}")
    printed = random_secret.sub("SECRET", result.stdout)
    assert printed == random_secret.sub("SECRET", render_kubernetes({"worker_replicas": 3}))


def test_unknown_variable_ends_with_exit_code_2() -> None:
    result = _run("--set", "workers=3")
    assert (result.returncode, result.stdout) == (2, "")
    assert "has no variable 'workers'" in result.stderr


def test_image_has_the_script_where_the_template_looks_for_it() -> None:
    dockerfile = (_FOLDER / "Dockerfile").read_text()
    (script,) = re.findall(r"COPY examples/kubernetes/train.py (\S+)", dockerfile)
    (image,) = re.findall(r"docker build --tag (\S+)", dockerfile)
    rendered = render_kubernetes()
    assert f'command: ["python3", "{script}"]' in rendered
    assert f'image: "{image}"' in rendered
    for path in re.findall(r"COPY (.+) /\S+", dockerfile):
        for part in path.split():
            assert (_FOLDER.parents[1] / part).exists()
