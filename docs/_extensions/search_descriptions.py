"""First paragraphs of pages: descriptions for search engines, and for our search on file://.

A browser lets no page read another from the file system, so there the search takes what it shows
below a title from a script, `_static/descriptions.js`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

_LENGTH = 200


def description_of(doctree: nodes.document) -> str:
    """Returns the first paragraph of a page as text, cut after a word."""
    found = doctree.next_node(nodes.paragraph)
    text = " ".join(found.astext().split()) if found else ""
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH].rsplit(' ', 1)[0]} …"


def _add_to_page(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    if doctree is not None and (text := description_of(doctree)):
        escaped = text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
        context["metatags"] = f'{context["metatags"]}<meta name="description" content="{escaped}">'


def _write(app: Sphinx, error: Exception | None) -> None:
    if error or app.builder.format != "html":
        return
    pages = sorted(app.env.found_docs)
    found = {page: description_of(app.env.get_doctree(page)) for page in pages}
    script = f"window.pageDescriptions = {json.dumps(found, ensure_ascii=False)};\n"
    (Path(app.outdir) / "_static" / "descriptions.js").write_text(script, "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects both."""
    app.connect("html-page-context", _add_to_page)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
