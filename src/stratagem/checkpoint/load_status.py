"""The state of a restore: what it has given to objects by now, and what still waits for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from stratagem.messages import explain

__all__ = ["Consumption", "LoadStatus"]

_MOST_NAMED = 10
_logger = logging.getLogger(__name__)


class Consumption:
    """Counts which values of a checkpoint objects have got; warns of the others when it is deleted.

    Args:
        where: the checkpoint, for messages.
        values: names of all values that it holds.
        optional: those of them that an object may do without, such as the state of metrics.
    """

    def __init__(self, where: str, values: Iterable[str], optional: Iterable[str]) -> None:
        self.where = where
        self._is_partial = False
        self._left = dict.fromkeys(values)
        self._optional = set(optional)
        self._has_matched = False
        self.unmatched: dict[str, None] = {}

    def consume(self, values: Iterable[str]) -> None:
        """Notes values that an object has got."""
        for value in values:
            self._left.pop(value, None)
            self._has_matched = True

    def matched(self) -> None:
        """Notes an object that the checkpoint holds, whose variables may still be missing."""
        self._has_matched = True

    @property
    def left(self) -> list[str]:
        """The values that no object has got."""
        return [value for value in self._left if value not in self._optional]

    @property
    def is_nontrivial(self) -> bool:
        """True if the checkpoint has values for any object."""
        return self._has_matched

    def expect_partial(self) -> None:
        """Turns the warning at deletion off."""
        self._is_partial = True

    def __del__(self) -> None:
        if self._is_partial or not (self.left or self.unmatched):
            return
        _logger.warning(
            "%s was not restored as a whole.\nValues that no object has got: %s.\n"
            "Objects that it does not hold: %s.\n"
            "Call .expect_partial() on what restore returned if that is right.",
            self.where,
            _named(self.left),
            _named(list(self.unmatched)),
        )


class LoadStatus:
    """Status of a restore, returned by `Checkpoint.restore` and `Checkpoint.read`.

    Objects whose variables are there have their values already. The others get them when their
    variables are created.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
        ...     path = sg.train.Checkpoint(model=saved).save(folder + "/ckpt")
        ...     model = keras.Sequential([keras.layers.Dense(2)])
        ...     status = sg.train.Checkpoint(model=model).restore(path)
        ...     model.build((None, 3))
        >>> _ = status.assert_consumed()
        >>> bool((model.layers[0].kernel.value == saved.layers[0].kernel.value).all())
        True

    Source: TF 2.21 checkpoint.py, CheckpointLoadStatus.
    """

    def __init__(self, consumption: Consumption) -> None:
        self._consumption = consumption

    def assert_consumed(self) -> LoadStatus:
        """Raises unless every value has an object, and every object its values.

        Metrics of a model are left out: they begin anew with each epoch.

        Raises:
            AssertionError: some have not, by now.
        """
        told = self._consumption
        if told.left or told.unmatched:
            raise AssertionError(
                explain(
                    f"{told.where} is not restored as a whole: no object has got "
                    f"{_named(told.left)}; it holds nothing for {_named(list(told.unmatched))}.",
                    expected="each saved value to be restored by now, and each object to be saved.",
                    fix="build the objects before, pass those that are missing to the Checkpoint, "
                    "or call assert_existing_objects_matched() or expect_partial() instead.",
                )
            )
        return self

    def assert_existing_objects_matched(self) -> LoadStatus:
        """Raises if there are objects with variables that the checkpoint does not hold.

        Raises:
            AssertionError: there are such objects.
        """
        told = self._consumption
        if told.unmatched:
            raise AssertionError(
                explain(
                    f"{told.where} holds nothing for {_named(list(told.unmatched))}.",
                    expected="a checkpoint of all objects whose variables exist.",
                    fix="leave out what is new, or call expect_partial() instead.",
                )
            )
        return self

    def assert_nontrivial_match(self) -> LoadStatus:
        """Raises if no object is one that the checkpoint holds.

        Raises:
            AssertionError: none is.
        """
        told = self._consumption
        if not told.is_nontrivial:
            raise AssertionError(
                explain(
                    f"No object is one of {told.where}, which holds {_named(told.left)}.",
                    expected="an object by a name with which one was saved.",
                    fix="pass the objects to the Checkpoint by the names with which they were "
                    "saved.",
                )
            )
        return self

    def expect_partial(self) -> LoadStatus:
        """Lets values be left over without a warning."""
        self._consumption.expect_partial()
        return self

    def __repr__(self) -> str:
        told: Any = self._consumption
        return f"LoadStatus({told.where!r}, waiting={len(told.left)})"


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (", ".join(names[:_MOST_NAMED]) or "none") + more
