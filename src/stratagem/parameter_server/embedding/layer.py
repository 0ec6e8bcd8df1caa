"""`DynamicEmbedding`: an embedding layer without a vocabulary, on parameter servers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras

from stratagem.contexts import get_strategy
from stratagem.errors import check_choice, check_number, check_type, invalid
from stratagem.execution.lookups import embedding_lookup, note_table
from stratagem.keras.variables.requests import annotated
from stratagem.parameter_server.client.shard_layout import KeyLayout
from stratagem.parameter_server.fingerprints import fingerprint
from stratagem.parameter_server.keras.variable import KeyedTableOptions
from stratagem.parameter_server.server.tables.row_formats import ROW_DTYPES, RowFormat
from stratagem.parameter_server.server.tables.table_options import (
    Admission,
    Eviction,
    NotSeenFor,
    RowInitializer,
    TierOptions,
    policy_from,
)
from stratagem.strategies.strategy import Strategy
from stratagem.variables.layouts import is_keyed

# Keras initializers as initial rows by key, which servers compute without code of a client.


def row_initializer(initializer: Any, default_seed: int) -> RowInitializer:
    """Returns the distribution of a Keras initializer, with its seed.

    `default_seed` is for an initializer without one.

    Raises:
        ValueError: an initializer of another kind.
    """
    kinds, seed = keras.initializers, _seed(initializer, default_seed)
    if isinstance(initializer, kinds.RandomUniform):
        return RowInitializer("uniform", initializer.minval, initializer.maxval, seed)
    if isinstance(initializer, kinds.TruncatedNormal):
        mean, deviation = initializer.mean, initializer.stddev
        return RowInitializer("truncated_normal", mean, deviation, seed)
    if isinstance(initializer, kinds.RandomNormal):
        return RowInitializer("normal", initializer.mean, initializer.stddev, seed)
    if isinstance(initializer, kinds.Zeros):
        return RowInitializer("constant", 0.0)
    if isinstance(initializer, kinds.Ones):
        return RowInitializer("constant", 1.0)
    if isinstance(initializer, kinds.Constant):
        return RowInitializer("constant", float(initializer.value))
    name = getattr(type(initializer), "__name__", repr(initializer))
    raise invalid(
        f"DynamicEmbedding received the initializer {name}.",
        expected="RandomUniform, RandomNormal, TruncatedNormal, Constant, Zeros or Ones: "
        "servers compute a row from its key, and no table has a known number of rows.",
        fix="choose the scale yourself: keras.initializers.RandomUniform(-0.05, 0.05).",
    )


def _seed(initializer: Any, default: int) -> int:
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    if config.get("seed") is None:  # Keras draws another one in each run
        return default
    seed: Any = initializer.seed
    is_generator = isinstance(seed, keras.random.SeedGenerator)
    own: Any = seed.get_config()["seed"] if is_generator else seed
    return int(own)


# Pooled lookups: weighted sums and means of rows, with padding left out.

COMBINERS = ("sum", "mean", "sqrtn")


def pooled(rows: jax.Array, mask: jax.Array | None, weights: Any, combiner: str) -> jax.Array:
    """Returns rows of shape (..., k, dim) combined to (..., dim).

    Args:
        rows: one row for each key.
        mask: False for padding, of shape (..., k); None for no padding.
        weights: of shape (..., k); None for 1.
        combiner: "sum" of weighted rows; "mean" divides it by the sum of weights, and "sqrtn" by
            the root of the sum of their squares. Without any row, the result is zeros.

    Raises:
        ValueError: weights of another shape.

    Source: TF 2.21 embedding_ops.py, embedding_lookup_sparse, safe_embedding_lookup_sparse.
    """
    shape = rows.shape[:-1]
    factors = jnp.ones(shape, rows.dtype) if weights is None else jnp.asarray(weights, rows.dtype)
    if factors.shape != shape:
        raise invalid(
            f"Weights of shape {factors.shape} were given for keys of shape {(*shape, 2)}.",
            expected=f"weights of shape {shape}: one for each key.",
            fix="pad weights like the ids.",
        )
    if mask is not None:
        factors = jnp.where(mask, factors, 0)
    total = jnp.einsum("...k,...kd->...d", factors, rows)
    if combiner == "sum":
        return total
    divisor = factors.sum(-1) if combiner == "mean" else jnp.square(factors).sum(-1)
    is_empty = divisor == 0
    divisor = jnp.where(is_empty, 1, divisor)  # no division by 0 in the gradient either
    if combiner == "sqrtn":
        divisor = jnp.sqrt(divisor)
    return jnp.where(is_empty[..., None], 0, total / divisor[..., None])


@keras.saving.register_keras_serializable("stratagem")
class DynamicEmbedding(keras.layers.Layer):
    """Embedding layer for 64-bit ids or strings without a vocabulary; rows are on servers.

    Parameter servers make the row of a key when a gradient for it arrives, and keep the optimizer's
    slots with it. A key without a row has its initial value, which depends on the key alone. So
    `evaluate` and `predict` create no row. Call it on the result of `sg.embedding.keys`, which
    belongs in the dataset.

    Use it in the scope of a `ParameterServerStrategy`, or of a `HybridStrategy` with a "server"
    rule, whatever that rule matches. Other strategies have no place for such rows.

    Args:
        output_dim: numbers in a row.
        initializer: initial rows: a uniform, normal, truncated normal or constant Keras
            initializer, or its name. Without a seed of its own, the layer's path is the seed.
        combiner: "sum", "mean" or "sqrtn" pools the rows of the last axis of keys, weighted if
            weights are given, as `tf.nn.embedding_lookup_sparse` does; None returns each row.
        mask_zero: True if the key 0, and so the empty string, is padding: it has no row, and no
            part in the result. Without a combiner, the layer returns zeros for it, and a mask.
        admission: `sg.embedding.AfterSightings` or `WithProbability`, for keys that deserve a row;
            None for all. Gradients of others are dropped.
        eviction: `sg.embedding.NotSeenFor`, `LeastFrequent` or `LeastRecent`; None to keep all.
        max_rows: most rows, divided over the servers; None for as many as fit in memory.
            `LeastFrequent` and `LeastRecent` need it. Without these, a full table makes no more
            rows.
        storage_dtype: "bfloat16" or "int8" (with a scale for each row): dtype in which servers hold
            and send the rows. Updates compute in float32, and round stochastically: the mean
            of the rounded number is the exact one. None for float32.
        tiers: `sg.embedding.TierOptions`: rows beyond a memory limit are on the servers' disks;
            None for all in memory.
        allow_row_export: True if `sg.embedding.export` may write keys with the rows. Keys may be
            ids of persons.
        name: name of the layer.
        **kwargs: `dtype` and `trainable`, as of any Keras layer.

    Raises:
        ValueError: invalid numbers, an unknown combiner or storage_dtype, or an initializer that
            depends on the number of rows. When it is built: outside of a strategy with parameter
            servers, or with a storage_dtype and weights of another dtype than float32.
        TypeError: keys of another dtype or shape, or a policy of another type.

    Example:
        >>> with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        ...     with strategy.scope():
        ...         words = sg.embedding.DynamicEmbedding(4, combiner="mean", mask_zero=True)
        ...     words(sg.embedding.keys([["new", "york", ""]])).shape
        (1, 4)

    Source: TF Recommenders Addons 0.8, dynamic_embedding; TF 2.21 embedding_lookup_sparse.
    """

    def __init__(
        self,
        output_dim: int,
        *,
        initializer: str | Mapping[str, Any] | keras.initializers.Initializer = "uniform",
        combiner: str | None = None,
        mask_zero: bool = False,
        admission: Admission | None = None,
        eviction: Eviction | None = None,
        max_rows: int | None = None,
        storage_dtype: str | None = None,
        tiers: TierOptions | Mapping[str, Any] | None = None,
        allow_row_export: bool = False,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.output_dim = output_dim
        self.initializer = keras.initializers.get(initializer)
        self.combiner = combiner
        self.mask_zero = mask_zero
        self.admission = _policy(admission, Admission, "admission")
        self.eviction = _policy(eviction, Eviction, "eviction")
        self.max_rows = max_rows
        self.storage_dtype = storage_dtype
        self.tiers = TierOptions(**tiers) if isinstance(tiers, Mapping) else tiers
        self.allow_row_export = allow_row_export
        self.supports_masking = False
        self._check()
        row_initializer(self.initializer, 0)  # raises for one that servers do not have

    def _check(self) -> None:
        check_number("DynamicEmbedding", output_dim=self.output_dim)
        check_number("DynamicEmbedding", or_none=True, max_rows=self.max_rows)
        check_choice("DynamicEmbedding", (None, *COMBINERS), combiner=self.combiner)
        check_choice("DynamicEmbedding", (None, *ROW_DTYPES), storage_dtype=self.storage_dtype)
        needs_limit = self.eviction is not None and not isinstance(self.eviction, NotSeenFor)
        if needs_limit and self.max_rows is None:
            raise invalid(
                f"DynamicEmbedding received eviction={self.eviction} without max_rows.",
                expected="a limit: such a policy evicts rows when the table is full.",
                fix="pass max_rows, or use sg.embedding.NotSeenFor.",
            )

    def build(self, input_shape: object = None) -> None:
        """Creates the table on the servers."""
        if get_strategy().placement.remote is None:
            raise invalid(
                f"DynamicEmbedding {self.name!r} was built under {get_strategy()}.",
                expected="a strategy with parameter servers, which have its rows.",
                fix="build the model in the scope of an sg.ParameterServerStrategy, or of an "
                'sg.HybridStrategy(placement={"embeddings": "server"}). For a fixed '
                "vocabulary, use keras.layers.Embedding.",
            )
        RowFormat((self.output_dim,), self.variable_dtype, self.storage_dtype)  # raises if invalid
        with annotated(keyed_table=KeyedTableOptions(self._table_fields(), self.mask_zero)):
            self.embeddings = self.add_weight(
                shape=(0, self.output_dim), initializer="zeros", name="embeddings"
            )
        note_table(self.embeddings)

    def _table_fields(self) -> dict[str, Any]:
        # The same in each run of a program, which may resume with the rows of the last one.
        seed = fingerprint(str(self.path).encode())
        return {
            **self._options(),
            "initializer": dataclasses.asdict(row_initializer(self.initializer, seed)),
            "allow_row_export": self.allow_row_export or None,
        }

    def _options(self) -> dict[str, Any]:
        return {
            "admission": _policy_fields(self.admission),
            "eviction": _policy_fields(self.eviction),
            "max_rows": self.max_rows,
            "storage_dtype": self.storage_dtype,
            "tiers": None if self.tiers is None else dataclasses.asdict(self.tiers),
        }

    def call(self, keys: jax.Array, weights: jax.Array | None = None) -> Any:
        """Looks up rows, and pools them if there is a combiner.

        Args:
            keys: uint32 array of shape (..., 2), from `sg.embedding.keys`.
            weights: array of shape (...); only with a combiner. None for 1.

        Returns:
            Array of shape (..., output_dim), without the last axis of keys if there is a combiner.

        Raises:
            TypeError: keys of another dtype or shape.
            ValueError: weights without a combiner, or of another shape.

        Example:
            See the class.

        Source: TF 2.21 embedding_ops.py, embedding_lookup_sparse.
        """
        if weights is not None and self.combiner is None:
            raise invalid(
                f"DynamicEmbedding {self.name!r} received weights, but has no combiner.",
                expected="weights of a sum or mean of rows.",
                fix='pass combiner="sum" to the layer, or multiply the rows yourself.',
            )
        rows: Any = keras.ops.cast(embedding_lookup(self.embeddings, keys), self.compute_dtype)
        mask = self._mask(keys)
        if self.combiner is not None:
            return pooled(rows, mask, weights, self.combiner)
        if mask is None:
            return rows
        factors: Any = keras.ops.cast(mask, rows.dtype)
        return rows * factors[..., None]

    def _mask(self, keys: Any) -> Any:
        return keras.ops.any(keys != 0, axis=-1) if self.mask_zero else None

    def compute_mask(self, inputs: Any, previous_mask: object = None) -> Any:
        """Returns the Keras mask: False for padding; None if rows are pooled or unmasked."""
        return self._mask(inputs) if self.combiner is None else None

    def compute_output_shape(
        self, keys_shape: tuple[int | None, ...], weights_shape: object = None
    ) -> tuple[int | None, ...]:
        """Returns the shape of the output for keys of a shape."""
        num_axes = 1 if self.combiner is None else 2
        return (*keys_shape[:-num_axes], self.output_dim)

    def load_own_variables(self, store: object) -> None:
        """Loads nothing: saved weights have no rows of a table on servers."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer as JSON."""
        config = {
            "output_dim": self.output_dim,
            "initializer": keras.initializers.serialize(self.initializer),
            "combiner": self.combiner,
            "mask_zero": self.mask_zero,
            **self._options(),
            "allow_row_export": self.allow_row_export,
        }
        return {**super().get_config(), **config}


def _policy_fields(policy: Any) -> dict[str, Any] | None:
    if policy is None:
        return None
    return {"kind": type(policy).__name__, **dataclasses.asdict(policy)}


def _policy(given: Any, kinds: Any, argument: str) -> Any:
    """Returns a policy, also from its fields in a config."""
    policy = policy_from(given) if isinstance(given, Mapping) else given
    wanted = f"one of {[one.__name__ for one in kinds.__args__]}, or None"
    how = f"pass {argument}=sg.embedding.{kinds.__args__[0].__name__}(...)."
    check_type(argument, policy, kinds | None, wanted, how, owner="DynamicEmbedding")
    return policy


# `sg.embedding.stats`: sizes and counters of keyed tables.


@dataclasses.dataclass(frozen=True)
class TableStats:
    """Size and counters of one keyed table, summed over its servers.

    Args:
        rows: number of rows.
        row_bytes: memory of a row: its values, optimizer slots, key, counters and index; 0.0 for a
            table without rows.
        created: rows that were created since the start.
        evicted: rows that were evicted.
        evicted_updates: row updates that the evicted rows had.
        refused_updates: gradients whose key had no row: not admitted, or the table was full.
        candidates: keys without a row that servers count for `AfterSightings`.
    """

    rows: int
    row_bytes: float
    created: int
    evicted: int
    evicted_updates: int
    refused_updates: int
    candidates: int


def stats(strategy: Strategy) -> dict[str, TableStats]:
    """Returns sizes and counters of the keyed tables of a strategy. Never a key.

    Args:
        strategy: a strategy with parameter servers, in the process of its coordinator.

    Returns:
        Figures by path of the table: `rows`, `row_bytes`, `created`, `evicted`, `evicted_updates`,
        `refused_updates`, and the `candidates` that `AfterSightings` counts.

    Raises:
        ValueError: the strategy has no parameter servers.

    Example:
        >>> with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        ...     with strategy.scope():
        ...         sg.embedding.DynamicEmbedding(8, name="users").build()
        ...     sg.embedding.stats(strategy)["users/embeddings"].rows
        0

    Source: specific to Stratagem.
    """
    remote = strategy.placement.remote
    if remote is None:
        raise invalid(
            f"sg.embedding.stats received {strategy}, which has no parameter servers.",
            expected="a ParameterServerStrategy, or a HybridStrategy with a 'server' rule.",
            fix="pass the strategy that the tables were created under.",
        )
    variables = remote.variables
    states = variables.client.describe()
    tables = [one for one in variables.named.values() if is_keyed(one)]
    return {one.path: _stats(variables.placement_of(one), states) for one in tables}


def _stats(layout: KeyLayout, states: Mapping[int, Mapping[str, Any]]) -> TableStats:
    numbers: Counter[str] = Counter()
    for shard, server in enumerate(layout.servers):
        numbers.update(states[server]["tables"][layout.name_of(shard)])
    rows, size_bytes = numbers["rows"], numbers["bytes"]
    fields = [one.name for one in dataclasses.fields(TableStats) if one.name != "row_bytes"]
    counts = {name: numbers[name] for name in fields}
    return TableStats(**counts, row_bytes=size_bytes / rows if rows else 0.0)
