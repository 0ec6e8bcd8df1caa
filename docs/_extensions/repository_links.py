"""Links of pages to files outside docs/, turned into links to the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

_LOGGER = logging.getLogger(__name__)


class RepositoryLinks(SphinxTransform):
    """Replaces relative links that leave docs/, such as `../../examples/08_estimator_digits.py`."""

    default_priority = 10

    def apply(self, **_: Any) -> None:
        """Replaces the links of a page; one that leads nowhere is a warning."""
        docs = Path(self.env.srcdir).resolve()
        folder = (docs / self.env.docname).parent
        kinds = addnodes.download_reference, addnodes.pending_xref
        for node in list(self.document.findall(lambda one: isinstance(one, kinds))):
            if node.get("reftype") != "myst":
                continue
            # MyST gives Markdown by its name from docs/, and other files from the page's folder.
            of_docs = node.get("refdomain") == "doc"
            path = ((docs if of_docs else folder) / node["reftarget"].partition("#")[0]).resolve()
            if path.is_relative_to(docs):
                continue
            path = path.with_suffix(".md") if of_docs else path
            if not (path.exists() and path.is_relative_to(docs.parent)):
                _LOGGER.warning("No such file: %s", node["reftarget"], location=node, type="ref")
                continue
            view = "tree" if path.is_dir() else "blob"
            place = f"{view}/{self.config.repository_branch}/{path.relative_to(docs.parent)}"
            uri = f"{self.config.repository_url}/{place}"
            link = nodes.reference("", "", refuri=uri, internal=False)
            link += [child.deepcopy() for child in node.children]
            node.replace_self(link)


def _set_edit_button(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    if name.startswith(tuple(app.config.generated_pages)):
        context["theme_use_edit_page_button"] = False


def setup(app: Sphinx) -> dict[str, bool]:
    """Adds the transform and its settings; pages made by the build get no edit button."""
    app.add_config_value("generated_pages", [], "html", list)
    app.connect("html-page-context", _set_edit_button)
    app.add_config_value("repository_url", "", "env", str)
    app.add_config_value("repository_branch", "main", "env", str)
    app.add_transform(RepositoryLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
