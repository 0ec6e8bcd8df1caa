"""`DatasetCreator`: data of `fit` and its siblings, created in each process by a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.errors import explain
from stratagem.input.sources.adapters import as_source
from stratagem.input.sources.source import INFINITE_CARDINALITY
from stratagem.options import InputContext, InputOptions


class DatasetCreator:
    """Data of `fit`, `evaluate` and `predict`, created by a function in each process that reads it.

    Under a `ParameterServerStrategy` these processes are the workers; otherwise they are the
    processes of the strategy. The dataset is neither sharded nor repeated: the function selects
    its part by its argument. An epoch is one pass over the dataset in each process, or
    `steps_per_epoch` batches.

    Args:
        dataset_fn: takes an `sg.InputContext` and returns a dataset, batched by the per-replica
            batch size.
        input_options: options for the transfer of batches to the devices; None for the defaults.

    Raises:
        TypeError: an argument has another type.

    Example:
        >>> def dataset_fn(context):  # each process reads its own part of the data
        ...     x = np.arange(8.0)[context.input_pipeline_id :: context.num_input_pipelines]
        ...     batch_size = context.get_per_replica_batch_size(4)
        ...     return sg.input.Dataset((x[:, None], x[:, None]), batch_size=batch_size)
        >>> with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(sg.DatasetCreator(dataset_fn), epochs=2, verbose=0)
        >>> len(history.history["loss"])
        2

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
                    fix="pass a function here, or pass the dataset itself to fit.",
                )
            )
        if input_options is not None and not isinstance(input_options, InputOptions):
            raise TypeError(
                explain(
                    f"DatasetCreator received input_options={input_options!r} of type "
                    f"{type(input_options).__name__}.",
                    expected="sg.InputOptions or None.",
                    fix="remove input_options, or pass sg.InputOptions(...).",
                )
            )
        self._dataset_fn = dataset_fn
        self._input_options = input_options

    @property
    def input_options(self) -> InputOptions | None:
        """Options for the transfer of batches to the devices."""
        return self._input_options

    def __call__(self, input_context: InputContext) -> Any:
        """Creates the dataset of one process.

        Args:
            input_context: index of the process and number of processes.

        Returns:
            The dataset that `dataset_fn` returned.

        Raises:
            TypeError: `dataset_fn` did not return a dataset.
            ValueError: it returned arrays, which are not batched.
        """
        made = self._dataset_fn(input_context)
        as_source(made)  # Raises for unsupported data.
        return made


def part_of(
    creator: DatasetCreator, worker: int, num_workers: int, *, are_in_sync: bool
) -> Callable[[InputContext], Any]:
    """Returns the dataset function of one of several workers.

    `are_in_sync` is True if the replicas of all workers run each step together.
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
    cardinality: int, name: str, steps: object, kind: str = "DatasetCreator whose dataset"
) -> None:
    """Raises ValueError if an epoch would never end: infinite data and `steps` is None."""
    if steps is None and cardinality == INFINITE_CARDINALITY:
        raise ValueError(
            explain(
                f"{name} received a {kind} is infinite, but no number of steps.",
                expected="a finite dataset, or the number of batches to read.",
                fix="pass steps_per_epoch to fit, validation_steps for validation_data, and steps "
                "to evaluate and predict.",
                code="SG309",
            )
        )
