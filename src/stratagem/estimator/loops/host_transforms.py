"""Host transforms: encoding of batches before devices, decoding of predictions after.

Devices cannot hold strings, so string processing happens here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.input.sources.adapters import as_source
from stratagem.input.sources.source import Reader, Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTransforms:
    """Functions applied on the host before and after a model function's steps; None for identity.

    `encode` takes a batch, `(features, labels)` or features, and the mode. `decode` takes a
    batch of predictions as NumPy arrays.
    """

    encode: Callable[[Any, str], Any] | None = None
    decode: Callable[[Any], Any] | None = None

    def encode_source(self, data: object, mode: str) -> Any:
        """Encodes the batches of an `input_fn` result, a dataset or a single batch."""
        encode = self.encode
        if encode is None:
            return data
        if isinstance(data[0] if isinstance(data, tuple) and data else data, Mapping):
            return encode(data, mode)
        return _EncodedSource(as_source(data), lambda batch: encode(batch, mode))

    def decode_predictions(self, predictions: object) -> Any:
        """Decodes a batch of predictions."""
        return predictions if self.decode is None else self.decode(predictions)


class _EncodedSource(Source):
    """Data source with a function applied to each batch."""

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

    def restore(self, state: object) -> None:
        self._reader.restore(state)

    def close(self) -> None:
        self._reader.close()
