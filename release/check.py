"""Checks that the package can be published: `make release-check`.

Builds the source archive and the wheel into dist/, checks their metadata, lints the recipes and
forms around them, and runs README's quick start with the wheel in an empty environment. With
`--audit`, compares the locks with the advisories of PyPI, too. The tools are those of the group
`release`, in an environment for this once.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
_QUICK_START = re.compile(
    r"^```python\n(?P<script>import stratagem.*?)^```$\s*^```text\n(?P<output>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_RELATIVE_LINK = re.compile(r"\]\((?!https?:|#|mailto:)[^)]*\)")
_SCHEMAS = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "citation-file-format": "CITATION.cff",
}


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    steps = [build, check_metadata, lint_recipes, run_quick_start]
    if "--audit" in sys.argv:
        steps.append(audit)
    with tempfile.TemporaryDirectory(prefix="stratagem-release-") as folder:
        venv.create(folder, with_pip=True)
        tools = Path(folder, "bin")
        pip = (tools / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
        _run(*pip, "--upgrade", "pip>=25.1")  # reads groups from then on
        _run(*pip, "--group", f"{ROOT / 'pyproject.toml'}:release")
        for step in steps:
            print(f"== {step.__name__}", flush=True)
            step(project, tools)


def build(project: dict, tools: Path) -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    _run(tools / "python", "-m", "build", "--outdir", DIST, ROOT)
    names = sorted(path.name for path in DIST.iterdir())
    stem = f"stratagem-{project['version']}"
    _require(names == [f"{stem}-py3-none-any.whl", f"{stem}.tar.gz"], f"dist/ holds {names}")


def check_metadata(project: dict, tools: Path) -> None:
    _run(tools / "python", "-m", "twine", "check", "--strict", *DIST.iterdir())
    (wheel,) = DIST.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        relative = _RELATIVE_LINK.findall(archive.read(name).decode())
    _require(not relative, f"the package's README has relative links: {relative}")
    citation = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    recipe = (ROOT / "release" / "conda" / "recipe.yaml").read_text()
    _require(
        citation is not None and citation[1].strip('"') == project["version"],
        f"CITATION.cff has another version than pyproject.toml: {project['version']}",
    )
    module = (ROOT / "src" / "stratagem" / "__init__.py").read_text()
    _require(f'__version__ = "{project["version"]}"' in module, "stratagem.__version__ is another")
    _require(f'version: "{project["version"]}"' in recipe, "the conda recipe has another version")
    missing = [
        requirement
        for requirement in project["dependencies"]
        if re.sub(r"(?<=\w)(?=>)", " ", requirement, count=1) not in recipe
    ]
    _require(not missing, f"the conda recipe lacks {missing}")


def lint_recipes(project: dict, tools: Path) -> None:
    del project
    for recipe in sorted((ROOT / "release" / "containers").glob("*.Dockerfile")):
        _run(tools / "hadolint", recipe)
    for schema, pattern in _SCHEMAS.items():
        paths = sorted(ROOT.glob(pattern))
        _require(bool(paths), f"no file matches {pattern}")
        _run(tools / "check-jsonschema", f"--builtin-schema=vendor.{schema}", *paths)


def run_quick_start(project: dict, tools: Path) -> None:
    """Runs README's script with the wheel in an empty environment, and compares its output."""
    del project, tools
    found = _QUICK_START.search((ROOT / "README.md").read_text())
    _require(found is not None, "README.md has no quick start followed by its output")
    (wheel,) = DIST.glob("*.whl")
    with tempfile.TemporaryDirectory(prefix="stratagem-quick-start-") as folder:
        python = Path(folder, "bin", "python")
        venv.create(folder, with_pip=True)
        _run(python, "-m", "pip", "install", "--quiet", wheel, "scikit-learn")
        _run(python, "-m", "pip", "check")
        script = Path(folder, "train.py")
        script.write_text(found["script"])
        # Nothing of the checkout may be seen: not its folder, not its settings.
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        shown = subprocess.run(
            [python, script],
            cwd=folder,
            env=environment,
            text=True,
            check=True,
            capture_output=True,
        ).stdout
    _require(shown == found["output"], f"README.md shows {found['output']!r}, the wheel {shown!r}")
    print(shown, end="")


def audit(project: dict, tools: Path) -> None:
    """Compares the locks with the advisories of PyPI; the oldest versions have some."""
    del project
    locks = sorted({*ROOT.glob("requirements/*.lock")} - {ROOT / "requirements" / "oldest.lock"})
    options = ("--disable-pip", "--require-hashes", "--strict")
    commands = {lock.name: (tools / "pip-audit", *options, "-r", lock) for lock in locks}
    failed = [name for name, command in commands.items() if subprocess.run(command).returncode]
    _require(not failed, f"there are advisories for {failed}")


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


def _require(is_met: bool, problem: str) -> None:
    if not is_met:
        sys.exit(f"Cannot be released: {problem}")


if __name__ == "__main__":
    main()
