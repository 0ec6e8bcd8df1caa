"""Datasets of an elastic group: read ahead on the host, and split where batches are used."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from stratagem.devices.mesh import Topology
from stratagem.input.batches import HostBatch, split_again, take_batch
from stratagem.input.distributed import DistributedDataset
from stratagem.input.iterator import DistributedIterator
from stratagem.input.loader import Loader
from stratagem.input.placement import PlacedBatches, place
from stratagem.input.sources.source import Reader
from stratagem.variables.distributed import PerReplica

_ONE = Topology(None)


class ElasticDataset(DistributedDataset):
    """A dataset that all members read, of which each uses its rows of every batch."""

    def begin(self) -> DistributedIterator:
        """Returns an iterator over the next epoch."""
        return self._begin_with(_ElasticIterator)

    def _loader(self, reader: Reader, **arguments: Any) -> Loader:
        del arguments
        return Loader(reader, _undivided, _ONE, to_device=False, can_seek=True)


def _undivided(reader: Reader) -> HostBatch:
    batch: HostBatch = next(reader)
    whole = take_batch(batch.rows(0, batch.num_examples), 1)
    return dataclasses.replace(whole, is_undivided=True)


class _ElasticIterator(DistributedIterator):
    def take(self, num_steps: int) -> list[PlacedBatches]:
        """Returns the next batches, split over the present members; see `DistributedIterator`."""
        taken: list[PlacedBatches] = []
        while len(taken) < num_steps:
            try:
                [on_host] = super().take(1)
            except StopIteration:
                if taken:
                    break
                raise
            taken.append(_placed(take_batch(on_host.value(), 1), self.strategy))
        return taken


def _placed(batch: HostBatch, strategy: Any) -> PlacedBatches:
    own = split_again(batch, strategy.topology)
    placed = place([own], strategy.topology)
    fields: dict[str, Any] = vars(placed) | {"hosts": [own], "strategy": strategy}
    return _ElasticBatches(**fields)


@dataclasses.dataclass(frozen=True)
class _ElasticBatches(PlacedBatches):
    """Batches whose values can be split again."""

    strategy: Any = None

    def value(self) -> Any:
        """Returns the only batch; its leaves can be split over the members that are left."""
        value = super().value()
        paths, structure = jax.tree.flatten(value, is_leaf=_is_per_replica)
        leaves = [
            dataclasses.replace(leaf, split_again=lambda place=place: self._again(place))
            if isinstance(leaf, PerReplica)
            else leaf
            for place, leaf in enumerate(paths)
        ]
        return jax.tree.unflatten(structure, leaves)

    def _again(self, place: int) -> Any:
        value = _placed(self.hosts[0], self.strategy).value()
        return jax.tree.leaves(value, is_leaf=_is_per_replica)[place]


def _is_per_replica(leaf: object) -> bool:
    return isinstance(leaf, PerReplica)
