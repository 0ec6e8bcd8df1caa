"""Candidates of a search: meshes, sharded state, rematerialization and precision."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from stratagem.planning.targets import Target


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of computing: policies of `sg.remat` and of Keras's precision; None for the model's.

    Args:
        remat: policy of `sg.remat`.
        precision: name of a dtype policy.

    Example:
        >>> sg.planning.Form("full").code("model")
        ['sg.remat(model, "full")']

    Source: specific to Stratagem.
    """

    remat: str | None = None
    precision: str | None = None

    def code(self, model: str) -> list[str]:
        """Returns the lines of code that set it.

        Args:
            model: name of the model's variable.
        """
        lines = [f'keras.config.set_dtype_policy("{self.precision}")'] if self.precision else []
        return [*lines, f'sg.remat({model}, "{self.remat}")'] if self.remat else lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCandidate:
    """One way to train a model on a machine.

    Args:
        strategy: name of the strategy's class.
        num_replicas: number of replicas, which split the batch.
        devices_per_replica: number of devices that share a layout (the model axis).
        shard_size: number of replicas that store one copy of sharded state.
        shard_state: as in `MirroredStrategy`.
        form: rematerialization and precision.

    Example:
        >>> candidate = sg.planning.PlanCandidate(
        ...     strategy="MirroredStrategy", num_replicas=8, devices_per_replica=1, shard_size=4,
        ...     shard_state="all", form=sg.planning.Form("full"))
        >>> candidate.mesh
        (2, 4, 1)
        >>> candidate.code.split("; ")[0]
        'strategy = sg.MirroredStrategy(shard_state="all", shard_size=4)'

    Source: specific to Stratagem.
    """

    strategy: str
    num_replicas: int
    devices_per_replica: int
    shard_size: int
    shard_state: str | None
    form: Form

    @property
    def mesh(self) -> tuple[int, int, int]:
        """Sizes of the axes: copies of the state, shards of a copy, devices of a replica."""
        return self.num_replicas // self.shard_size, self.shard_size, self.devices_per_replica

    @property
    def code(self) -> str:
        """The code that gives it; `layout_map` and `model` are the script's."""
        arguments: list[str] = []
        if self.shard_state:
            arguments.append(f'shard_state="{self.shard_state}"')
            if self.shard_size < self.num_replicas:
                arguments.append(f"shard_size={self.shard_size}")
        if self.devices_per_replica > 1:
            arguments.append(f"devices_per_replica={self.devices_per_replica}")
            arguments.append("layout_map=layout_map")
        first, rest = f"strategy = sg.{self.strategy}({', '.join(arguments)})", self.form
        before = Form(precision=rest.precision).code("model")
        return "; ".join([*before, first, *Form(rest.remat).code("model")])

    @property
    def num_settings(self) -> int:
        """Number of settings that differ from the defaults."""
        given = (self.form.remat, self.form.precision, self.shard_state)
        is_hybrid = self.shard_state is not None and self.shard_size < self.num_replicas
        return sum(map(bool, given)) + is_hybrid + (self.devices_per_replica > 1)


def list_candidates(
    target: Target,
    global_batch: int,
    forms: Sequence[Form],
    *,
    strategy: str,
    model_sizes: Sequence[int] = (1,),
) -> list[PlanCandidate]:
    """Returns all candidates whose replicas can split the batch.

    Args:
        target: the machine.
        global_batch: examples over all replicas.
        forms: that were traced.
        strategy: name of the strategy's class.
        model_sizes: numbers of devices that a layout may be divided over.
    """
    found: list[PlanCandidate] = []
    for size, form in itertools.product(model_sizes, forms):
        num_replicas = target.num_devices // size
        if target.num_devices % size or global_batch % num_replicas:
            continue
        shardings: list[tuple[str | None, int]] = [(None, 1)]
        shardings += itertools.product(("optimizer", "all"), _shard_sizes(num_replicas))
        found += [
            PlanCandidate(
                strategy=strategy,
                num_replicas=num_replicas,
                devices_per_replica=size,
                shard_size=shards,
                shard_state=shard_state,
                form=form,
            )
            for shard_state, shards in shardings
        ]
    return found


def _shard_sizes(num_replicas: int) -> list[int]:
    return [size for size in range(2, num_replicas + 1) if num_replicas % size == 0]
