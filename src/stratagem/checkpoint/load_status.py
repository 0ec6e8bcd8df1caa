"""Status of a restore: the values that objects have received and those still pending."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from stratagem.errors import explain

_MAX_NAMES = 10
_logger = logging.getLogger(__name__)


class Consumption:
    """Tracks restored values of a checkpoint; on deletion, warns about values nothing received.

    `optional` values need no object, such as the state of metrics.
    """

    def __init__(self, where: str, values: Iterable[str], optional: Iterable[str]) -> None:
        self.where = where
        self._is_partial = False
        self._left = dict.fromkeys(values)
        self._optional = set(optional)
        self._has_matched = False
        self.unmatched: dict[str, None] = {}

    def consume(self, values: Iterable[str]) -> None:
        """Records values that an object has received."""
        for value in values:
            self._left.pop(value, None)
            self._has_matched = True

    def matched(self) -> None:
        """Records an object of the checkpoint; its variables may still be missing."""
        self._has_matched = True

    @property
    def left(self) -> list[str]:
        """Names of the required values that no object has received."""
        return [value for value in self._left if value not in self._optional]

    @property
    def left_names(self) -> str:
        """The first of these values, for messages."""
        return _first_names(self.left)

    @property
    def unmatched_names(self) -> str:
        """The first objects without values, for messages."""
        return _first_names(list(self.unmatched))

    @property
    def is_nontrivial(self) -> bool:
        """True if the checkpoint has values for any object."""
        return self._has_matched

    def expect_partial(self) -> None:
        """Disables the warning at deletion."""
        self._is_partial = True

    def __del__(self) -> None:
        if self._is_partial or not (self.left or self.unmatched):
            return
        _logger.warning(
            "%s was only partly restored.\nValues without an object: %s.\n"
            "Objects without values: %s.\n"
            "If this is intended, call .expect_partial() on the result of restore().",
            self.where,
            self.left_names,
            self.unmatched_names,
        )


class LoadStatus:
    """Status of a restore, returned by `Checkpoint.restore` and `Checkpoint.read`.

    Objects with variables already have their values. Other objects get them when their variables
    are created.

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
        """Checks that every value was restored and every object has its values.

        Metrics of a model are exempt: they are reset at each epoch.

        Returns:
            This status.

        Raises:
            AssertionError: values or objects are left over.
        """
        consumption = self._consumption
        if consumption.left or consumption.unmatched:
            raise AssertionError(
                explain(
                    f"{consumption.where} is only partly restored. Values without an object: "
                    f"{consumption.left_names}. Objects without values: "
                    f"{consumption.unmatched_names}.",
                    expected="an object for each saved value, and saved values for each object.",
                    fix="build the objects first, pass the missing ones to the Checkpoint, or "
                    "call assert_existing_objects_matched() or expect_partial() instead.",
                    code="SG704",
                )
            )
        return self

    def assert_existing_objects_matched(self) -> LoadStatus:
        """Checks that the checkpoint holds all objects with variables.

        Returns:
            This status.

        Raises:
            AssertionError: it does not.
        """
        consumption = self._consumption
        if consumption.unmatched:
            raise AssertionError(
                explain(
                    f"{consumption.where} holds no values for {consumption.unmatched_names}.",
                    expected="a checkpoint of all objects whose variables exist.",
                    fix="remove the new objects from the Checkpoint, or call expect_partial().",
                    code="SG704",
                )
            )
        return self

    def assert_nontrivial_match(self) -> LoadStatus:
        """Checks that the checkpoint holds at least one of the objects.

        Returns:
            This status.

        Raises:
            AssertionError: it holds none.
        """
        consumption = self._consumption
        if not consumption.is_nontrivial:
            raise AssertionError(
                explain(
                    f"No object matches {consumption.where}, which holds {consumption.left_names}.",
                    expected="at least one object under the name it was saved with.",
                    fix="pass the objects to the Checkpoint under the names they were saved with.",
                    code="SG704",
                )
            )
        return self

    def expect_partial(self) -> LoadStatus:
        """Disables the warning about values that were not restored.

        Returns:
            This status.
        """
        self._consumption.expect_partial()
        return self

    def __repr__(self) -> str:
        consumption = self._consumption
        return f"LoadStatus({consumption.where!r}, waiting={len(consumption.left)})"


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return (", ".join(names[:_MAX_NAMES]) or "none") + more
