"""Pages of the API reference: written before Sphinx reads the site, from the public names.

The types in signatures are plain text unless they are public classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import api_pages
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

_FOLDER = "reference/api"


def _write(app: Sphinx) -> None:
    url = getattr(app.config, "repository_url", None)
    api_pages.write_pages(Path(app.srcdir) / _FOLDER, url)


def _show_as_sg(app: Sphinx, domain: str, kind: str, content: nodes.Element) -> None:
    """Shows `stratagem.X` as users write it, `sg.X`."""
    if domain != "py" or content.parent is None:
        return
    for signature in content.parent.findall(addnodes.desc_signature):
        if signature.get("module") == "stratagem" and signature.parent is content.parent:
            place = signature.next_node(addnodes.desc_addname)
            if place is None:
                place = addnodes.desc_addname()
                name = signature.next_node(addnodes.desc_name)
                signature.insert(signature.index(name), place)
            if not place.astext().startswith("sg."):
                place.insert(0, nodes.Text("sg."))


def _resolve_type(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Element
) -> Any:
    """Links the name of a public class in a signature; leaves other types as they are."""
    if node.get("refdomain") != "py" or not node["refdoc"].startswith(f"{_FOLDER}/"):
        return None
    if node.get("refspecific") is None and node.get("refexplicit"):
        return None  # a link of a page, which must lead somewhere
    if node["reftarget"].startswith("typing."):
        return content  # not sg.checkpoint.Any
    domain = env.domains["py"]
    last = node["reftarget"].rpartition(".")[2]
    names = [
        name
        for name, entry in domain.objects.items()
        if name.startswith("stratagem.") and name.rpartition(".")[2] == last
        if entry.objtype in ("class", "exception")
    ]
    if len(names) != 1:
        return content
    entry = domain.objects[names[0]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects all three."""
    app.connect("builder-inited", _write)
    app.connect("object-description-transform", _show_as_sg)
    app.connect("missing-reference", _resolve_type)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
