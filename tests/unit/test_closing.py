"""Objects that a `with` block closes, once, also after an error."""

from __future__ import annotations

import pytest

from stratagem.resources import Closing


class Resource(Closing):
    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def test_block_closes_what_it_entered() -> None:
    with Resource() as resource:
        assert resource.num_closed == 0
    assert resource.num_closed == 1


def test_error_comes_out_after_the_resource_is_closed() -> None:
    resource = Resource()
    with pytest.raises(ValueError, match="a bug"), resource:
        raise ValueError("a bug")
    assert resource.num_closed == 1


def test_class_without_close_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        type("Endless", (Closing,), {})()
