"""A change of the public API is seen: the listing in the repository is that of the code."""

from __future__ import annotations

import difflib

from tests.architecture import public_api


def test_listing_is_current() -> None:
    listed = public_api.LISTING.read_text().splitlines()
    current = public_api.public_api().splitlines()
    changes = list(difflib.unified_diff(listed, current, "listed", "current", n=0, lineterm=""))
    assert not changes, (
        "\n".join(changes)
        + "\nIf the change is meant, run `python -m tests.architecture.public_api`."
    )
