"""A function that makes the data of `fit`, `evaluate` or `predict` where it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.input.sources import INFINITE_CARDINALITY, as_source
from stratagem.messages import explain
from stratagem.options import InputContext, InputOptions

__all__ = ["DatasetCreator", "part_of", "require_end"]


class DatasetCreator:
    """Data of `fit`, `evaluate` and `predict`, made by a function in each process that reads it.

    Under a `ParameterServerStrategy` these are its workers, elsewhere the processes of the
    strategy. Nothing is split or repeated: the function shares the data out by its argument, and an
    epoch is one pass over what it returns in each process, or `steps_per_epoch` batches.

    Args:
        dataset_fn: takes an `sg.InputContext` and returns a dataset, batched by the per-replica
            size.
        input_options: how batches reach the devices; None for the defaults.

    Raises:
        TypeError: one of another type.

    Example::

        def dataset_fn(context):
            files = FILES[context.input_pipeline_id :: context.num_input_pipelines]
            return read(files, batch_size=context.get_per_replica_batch_size(256))


        model.fit(sg.DatasetCreator(dataset_fn), epochs=5)

    Source: Keras 2.15 keras/utils/dataset_creator.py, DatasetCreator.
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Any],
        input_options: InputOptions | None = None,
    ) -> None:
        if not callable(dataset_fn):
            raise TypeError(
                explain(
                    f"DatasetCreator received dataset_fn={dataset_fn!r} of type "
                    f"{type(dataset_fn).__name__}.",
                    expected="a function of an sg.InputContext that returns a dataset.",
                    fix="pass the function; a dataset itself goes to fit.",
                )
            )
        if input_options is not None and not isinstance(input_options, InputOptions):
            raise TypeError(
                explain(
                    f"DatasetCreator received input_options={input_options!r} of type "
                    f"{type(input_options).__name__}.",
                    expected="sg.InputOptions or None.",
                    fix="leave input_options out.",
                )
            )
        self._dataset_fn = dataset_fn
        self._input_options = input_options

    @property
    def input_options(self) -> InputOptions | None:
        """Options of the transfer of batches to the devices."""
        return self._input_options

    def __call__(self, input_context: InputContext) -> Any:
        """Makes the dataset of one process.

        Args:
            input_context: which process of how many it is.

        Raises:
            TypeError: the function returned no dataset. ValueError: arrays, which are not batched.
        """
        made = self._dataset_fn(input_context)
        as_source(made)  # which raises
        return made


def part_of(
    creator: DatasetCreator, worker: int, num_workers: int, *, are_in_sync: bool
) -> Callable[[InputContext], Any]:
    """Returns the function that makes the dataset of one of several workers.

    Args:
        creator: makes the datasets of all.
        worker: its index.
        num_workers: how many there are.
        are_in_sync: whether the replicas of all workers make one step.
    """

    def dataset_fn(own: InputContext) -> Any:
        return creator(
            InputContext(
                num_workers * own.num_input_pipelines,
                worker * own.num_input_pipelines + own.input_pipeline_id,
                (num_workers if are_in_sync else 1) * own.num_replicas_in_sync,
            )
        )

    return dataset_fn


def require_end(
    cardinality: int, name: str, steps: Any, kind: str = "DatasetCreator whose dataset"
) -> None:
    """Raises where an epoch would never end.

    Args:
        cardinality: of the dataset.
        name: of the method that reads it.
        steps: how many batches it is to read; None for all.
        kind: what it is, for the message.

    Raises:
        ValueError: that is so.
    """
    if steps is None and cardinality == INFINITE_CARDINALITY:
        raise ValueError(
            explain(
                f"{name} received a {kind} has no end, and no number of steps.",
                expected="a dataset that ends, or the number of batches to read.",
                fix="pass steps_per_epoch to fit, validation_steps for validation_data, and steps "
                "to evaluate and predict.",
            )
        )
