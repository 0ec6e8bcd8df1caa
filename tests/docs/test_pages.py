"""Documentation pages print what they show, unless listed as fragments."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratagem import logs

_DOCS = Path(__file__).parents[2] / "docs"
_FOLDER = _DOCS / "libraries"
_LIST = "index.md"
# Pages whose blocks are excerpts or need a cluster; every other page is one program.
_FRAGMENTS = (
    "clusters/detection.md",
    "clusters/kubernetes.md",
    "clusters/launch.md",
    "clusters/ray.md",
    "clusters/remote.md",
    "design/architecture.md",
    "guides/fine_tune.md",  # with KerasHub: validation/third_party
    "guides/keras.md",
    "guides/loops.md",
    "guides/many_workers.md",
    "guides/parameter_servers.md",
    "how_to/flax_nnx.md",  # this one and the other libraries' pages: validation/third_party
    "how_to/goodput.md",
    "how_to/keras_hub.md",
    "how_to/keras_rs.md",
    "how_to/optax.md",
    "how_to/plan.md",
    "how_to/third_party.md",
)
_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\s*^```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\]\((?P<target>[^)#]+\.md)\)")


@dataclasses.dataclass(frozen=True)
class _Block:
    """One ```python block of a page: what to run, and what the ```text block below it shows.

    `line` is that of the opening fence; without a ```text block nothing is shown.
    """

    code: str
    shown: str
    line: int


def _blocks(page: str) -> list[_Block]:
    return [
        _Block(
            code=match["code"],
            shown=_stripped(match["shown"] or ""),
            line=page.count("\n", 0, match.start()) + 1,
        )
        for match in _BLOCK.finditer(page)
    ]


def _stripped(printed: str) -> str:
    """Output without the white space at the end of each line and of the whole."""
    return "\n".join(line.rstrip() for line in printed.splitlines()).rstrip()


def differences(page: str, name: str) -> list[str]:
    """Runs the blocks of a page in one namespace and says where they print something else."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found: list[str] = []
    for block in _blocks(page):
        printed = io.StringIO()
        # Empty lines in front, so that a traceback shows the line of the page.
        program = compile("\n" * block.line + block.code, name, "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(program, namespace)
        output = _stripped(printed.getvalue())
        if output != block.shown:
            shown = textwrap.indent(block.shown or "nothing", "    ")
            found.append(
                f"{name}:{block.line}: the block below this line prints\n"
                f"{textwrap.indent(output or 'nothing', '    ')}\nand the page shows\n{shown}"
            )
    return found


# Each takes a second or more: it trains, starts processes, or compiles many programs.
_SLOW = {
    "concepts/exactness.md",
    "guides/estimator.md",
    "guides/failures.md",
    "guides/input_on_other_machines.md",
    "guides/large_models.md",
    "guides/recommenders.md",
    "guides/slow_links.md",
    "how_to/activations.md",
    "how_to/checkpoints.md",
    "how_to/gradient_accumulation.md",
    "how_to/keyed_tables.md",
    "how_to/mixed_precision.md",
    "how_to/notebooks.md",
    "how_to/profiling.md",
    "how_to/seeds_and_reproducibility.md",
    "how_to/summaries.md",
    "how_to/uneven_data.md",
    "libraries/batch_normalization.md",
    "libraries/custom_layer.md",
    "libraries/custom_metric.md",
    "libraries/losses_over_pairs.md",
    "libraries/on_read_variables.md",
    "libraries/sparse_gradients.md",
    "migrate/accelerate.md",
    "migrate/overview.md",
}


def _programs() -> Iterator[Any]:
    for path in sorted(_DOCS.rglob("*.md")):
        name = str(path.relative_to(_DOCS))
        if name not in _FRAGMENTS and _blocks(path.read_text(encoding="utf-8")):
            marks = [pytest.mark.slow] if name in _SLOW else []
            yield pytest.param(path, marks=marks, id=name)


def test_named_pages_exist() -> None:
    assert [name for name in {*_FRAGMENTS, *_SLOW} if not (_DOCS / name).exists()] == []


@pytest.mark.parametrize("path", list(_programs()))
def test_page_prints_what_it_shows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_TPU_PLATFORM", "cpu")
    for name in ("level", "format", "task"):  # a page may choose them
        monkeypatch.setattr(logs._LogState, name, None)
    page = path.read_text(encoding="utf-8")
    found = differences(page, str(path))
    assert not found, "\n".join(found)


def test_loops_print_what_they_show() -> None:
    """The page of loops is no program, but blocks that show something are one each."""
    page = (_DOCS / "guides" / "loops.md").read_text(encoding="utf-8")
    programs = [block for block in _blocks(page) if block.shown]
    assert any("carry=" in block.code for block in programs)
    for block in programs:
        program = f"```python\n{block.code}```\n```text\n{block.shown}\n```\n"
        assert not differences(program, f"loops.md:{block.line}")


def test_every_page_is_in_the_list() -> None:
    listed = {match["target"] for match in _LINK.finditer((_FOLDER / _LIST).read_text("utf-8"))}
    assert {path.name for path in _FOLDER.glob("*.md")} - {_LIST} <= listed


_PAGE = """Two blocks share their names.

```python
number = 2
```

It is doubled.

```python
number = 2 * number
print(number, "   ")
print()
```

```text
4
```

This is not run:

```text
5
```
"""


def test_page_whose_text_is_right_passes() -> None:
    assert differences(_PAGE, "page.md") == []
    assert [block.line for block in _blocks(_PAGE)] == [3, 9]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("text\n4", "text\n5"),
        ("text\n4", "text\n4\n4"),
        ("text\n4", "text\n 4"),
        ("text\n4", "text"),
        ("```text\n4", "It prints\n\n```text\n4"),
    ],
    ids=["other", "more", "indented", "empty", "not directly below"],
)
def test_page_whose_text_is_wrong_is_found(right: str, wrong: str) -> None:
    page = _PAGE.replace(right, wrong)
    assert page != _PAGE
    (difference,) = differences(page, "page.md")
    assert difference.startswith("page.md:9: the block below this line prints\n    4\n")


def test_page_that_raises_is_found_with_its_line() -> None:
    page = _PAGE.replace("number = 2\n", "number = 2\nnumber.missing\n")
    with pytest.raises(AttributeError, match="missing") as caught:
        differences(page, "page.md")
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno) == ("page.md", 4)
