"""Notebooks spread over the pages that are read: processes of Sphinx get contiguous parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment


def spread(pages: list[str], notebooks: set[str]) -> list[str]:
    """Returns the pages with the notebooks at equal distances, the first one at the start."""
    others = [page for page in pages if page not in notebooks]
    run = [page for page in pages if page in notebooks]
    spread_out: list[str] = []
    for index, page in enumerate(run):
        start, end = (len(others) * at // len(run) for at in (index, index + 1))
        spread_out += [page, *others[start:end]]
    return spread_out or others


def _order(app: Sphinx, env: BuildEnvironment, pages: list[str]) -> None:
    del app
    pages[:] = spread(pages, {page for page in pages if env.doc2path(page).suffix == ".ipynb"})


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects it to Sphinx, which asks for the order before it reads the pages."""
    app.connect("env-before-read-docs", _order)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
