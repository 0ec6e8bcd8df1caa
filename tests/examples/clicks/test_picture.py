"""A picture of how late gradients were."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("counts", [{0: 5, 1: 90, 7: 2}, {0: 4}, {}])
def test_picture_is_drawn(tmp_path, counts) -> None:
    # The tests of the oldest versions load this module without the extra `observe`.
    from examples.clicks.picture import draw_staleness

    path = tmp_path / "new" / "staleness.png"
    draw_staleness(path, counts, "some workers")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
