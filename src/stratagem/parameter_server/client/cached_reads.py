"""Cache of reads from parameter servers, for the duration of a function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from stratagem.parameter_server.client.client import ServerClient


class CachedReads:
    """Copies of values, updated with own writes. Tables with row lookups are never cached."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._values: dict[str, np.ndarray] = {}
        self._scalars: dict[int, dict[str, np.ndarray]] = {}

    def pull(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Returns whole variables or slots by name; fetches those that are not cached."""
        missing = [name for name in names if name not in self._values]
        pulled = self._client.pull(missing) if missing else {}
        self._keep(pulled)
        return {name: pulled[name] if name in pulled else self._values[name] for name in names}

    def scalars(self, server: int) -> Mapping[str, np.ndarray]:
        """Returns an optimizer's scalars; asks `server` if they are not cached."""
        if server not in self._scalars:
            self._scalars[server] = dict(self._client.scalars(server))
        return self._scalars[server]

    def note_assigned(self, name: str, value: np.ndarray, sign: int) -> None:
        """Records a write by this process: `sign` 0 sets the value, 1 adds it, -1 subtracts it."""
        if not sign:
            self._keep({name: value.copy()})
        elif name in self._values:
            self._values[name] = np.asarray(self._values[name] + sign * value, value.dtype)

    def note_scalar(self, name: str, value: np.ndarray) -> None:
        """Records that this process set an optimizer scalar on all servers."""
        for scalars in self._scalars.values():
            scalars[name] = value

    def note_pushed(self, names: Iterable[str], brought: Mapping[str, np.ndarray]) -> None:
        """Records that servers applied gradients of this process to the variables `names`.

        `brought` holds values after the update; other updated values are fetched when read.
        """
        updated = {*names}
        for name in list(self._values):
            if name in updated or name.rpartition(":")[0] in updated:  # also slots
                del self._values[name]
        self._scalars.clear()
        self._keep(brought)

    def _keep(self, values: Mapping[str, np.ndarray]) -> None:
        for name, value in values.items():
            if not self._client.placement_of(name).has_rows:
                self._values[name] = value
