"""What one function has read of the servers, so that it asks for each value once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from stratagem.servers import ServerClient

__all__ = ["CachedReads"]


class CachedReads:
    """Copies of values, with what this process has written since they were read.

    Tables, of which rows are looked up, are asked for each time.

    Args:
        client: of the servers.
    """

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._values: dict[str, np.ndarray] = {}
        self._scalars: dict[int, dict[str, np.ndarray]] = {}

    def pull(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Returns whole variables; asks for those that were not read before.

        Args:
            names: theirs, or of slots.
        """
        missing = [name for name in names if name not in self._values]
        pulled = self._client.pull(missing) if missing else {}
        self._keep(pulled)
        return {name: pulled[name] if name in pulled else self._values[name] for name in names}

    def scalars(self, server: int) -> Mapping[str, np.ndarray]:
        """Returns what an optimizer keeps once.

        Args:
            server: the one that is asked if nobody has asked it before.
        """
        if server not in self._scalars:
            self._scalars[server] = dict(self._client.scalars(server))
        return self._scalars[server]

    def note_assigned(self, name: str, value: np.ndarray, sign: int) -> None:
        """Notes that this process has changed a variable.

        Args:
            name: its name.
            value: of its shape.
            sign: 0 sets it; 1 adds the value, -1 subtracts it.
        """
        if not sign:
            self._keep({name: value.copy()})
        elif name in self._values:
            self._values[name] = np.asarray(self._values[name] + sign * value, value.dtype)

    def note_scalar(self, name: str, value: np.ndarray) -> None:
        """Notes that this process has set what an optimizer keeps once, on all servers."""
        for scalars in self._scalars.values():
            scalars[name] = value

    def note_pushed(self, names: Iterable[str], brought: Mapping[str, np.ndarray]) -> None:
        """Notes that servers have had gradients of this process.

        Args:
            names: of the variables that were updated.
            brought: values after the update; what was updated besides is asked for when it is read.
        """
        updated = {*names}
        for name in list(self._values):
            if name in updated or name.rpartition(":")[0] in updated:  # itself, or a slot of it
                del self._values[name]
        self._scalars.clear()
        self._keep(brought)

    def _keep(self, values: Mapping[str, np.ndarray]) -> None:
        for name, value in values.items():
            if not self._client.placement_of(name).has_rows:
                self._values[name] = value
