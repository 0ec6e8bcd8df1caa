"""What an Estimator does with batches before they reach devices, and with predictions after.

Strings cannot reach a device: what has to do with them happens here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.input.sources import Reader, Source, as_source

__all__ = ["HostParts"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostParts:
    """Two functions on the host, around the steps of a model function.

    Args:
        encode: called with a batch of `input_fn` and the mode, returns the batch for the devices;
            None to leave batches as they are. Batches are `(features, labels)` or features, which
            are a dict.
        decode: called with the predictions of a batch, as NumPy arrays; None to leave them.
    """

    encode: Callable[[Any, str], Any] | None = None
    decode: Callable[[Any], Any] | None = None

    def encoded(self, made: Any, mode: str) -> Any:
        """Returns what `input_fn` gave, a dataset or a batch, with its batches encoded.

        Args:
            made: what `input_fn` returned.
            mode: one of `ModeKeys`.
        """
        encode = self.encode
        if encode is None:
            return made
        if isinstance(made[0] if isinstance(made, tuple) and made else made, Mapping):
            return encode(made, mode)
        return _EncodedSource(as_source(made), lambda batch: encode(batch, mode))

    def decoded(self, predictions: Any) -> Any:
        """Returns predictions as the user gets them.

        Args:
            predictions: of a batch, NumPy arrays.
        """
        return predictions if self.decode is None else self.decode(predictions)


class _EncodedSource(Source):
    """Another source, with a function called on each batch."""

    def __init__(self, source: Source, encode: Callable[[Any], Any]) -> None:
        self._source = source
        self._encode = encode

    @property
    def cardinality(self) -> int:
        return self._source.cardinality

    def open(self, epoch: int) -> Reader:
        return _EncodingReader(self._source.open(epoch), self._encode)


class _EncodingReader(Reader):
    def __init__(self, reader: Reader, encode: Callable[[Any], Any]) -> None:
        self._reader = reader
        self._encode = encode
        self.has_cheap_state = reader.has_cheap_state

    def read(self) -> Any:
        return self._encode(next(self._reader))

    def state(self) -> Any:
        return self._reader.state()

    def restore(self, state: Any) -> None:
        self._reader.restore(state)

    def close(self) -> None:
        self._reader.close()
