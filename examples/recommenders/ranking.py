"""Two models that predict clicks: DLRM and DCN-v2, and streams of clicks with and without drift.

DLRM (Naumov et al., 2019) lets each pair of features interact by an inner product. DCN-v2 (Wang et
al., 2021) has cross layers, x' = x0 * (W x + b) + x. Both look up each id in one table, and return
logits. Clicks follow `examples.clicks.law`, whose best possible AUC is known.
"""

import dataclasses

import stratagem as sg  # noqa: F401  isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np
from keras import layers, ops

from examples.clicks.law import NUM_FIELDS, NUM_NUMBERS, ClickLaw, hashed

MODELS = ("dlrm", "dcn")
_NUM_CROSSES = 2
# Streams of the hashes below; those of the law are smaller than 1,000.
_PHASE, _NAME = 1000, 2000


def build(name, tables, num_ids):
    """Returns a model of dicts of `ids` and `numbers`, which returns logits.

    Args:
        name: one of `MODELS`.
        tables: `Tables`, which makes its table.
        num_ids: rows of a table with a vocabulary.
    """
    ids = tables.input("ids", NUM_FIELDS)
    numbers = layers.Input((NUM_NUMBERS,), name="numbers")
    vectors = tables.make("table", num_ids)(ids)
    logits = _dlrm(vectors, numbers) if name == "dlrm" else _dcn(vectors, numbers)
    return keras.Model({"ids": ids, "numbers": numbers}, logits, name=name)


def _dlrm(vectors, numbers):
    bottom = layers.Dense(32, "relu")(numbers)
    bottom = layers.Dense(vectors.shape[-1])(bottom)
    features = ops.concatenate([vectors, bottom[:, None]], axis=1)
    products = ops.matmul(features, ops.transpose(features, (0, 2, 1)))
    left, right = np.triu_indices(NUM_FIELDS + 1, k=1)
    pairs = ops.take(
        ops.reshape(products, (-1, (NUM_FIELDS + 1) ** 2)), left * (NUM_FIELDS + 1) + right, axis=1
    )
    top = layers.Dense(64, "relu")(ops.concatenate([bottom, pairs], axis=1))
    return layers.Dense(1)(top)[:, 0]


def _dcn(vectors, numbers):
    start = ops.concatenate([layers.Flatten()(vectors), numbers], axis=1)
    crossed = start
    for _ in range(_NUM_CROSSES):
        crossed = start * layers.Dense(start.shape[-1])(crossed) + crossed
    deep = layers.Dense(32, "relu")(layers.Dense(64, "relu")(start))
    return layers.Dense(1)(ops.concatenate([crossed, deep], axis=1))[:, 0]


@dataclasses.dataclass(frozen=True)
class DriftingLaw(ClickLaw):
    """Clicks on items that come and go: the id of each rank is replaced by a new one.

    An id lives for `life` examples. Those of different ranks are replaced at different times, so
    that the law drifts all the time. Ids are hashes of 64 bits: no vocabulary can have them.

    Args:
        life: examples until an id is replaced.
    """

    life: int = 1_000_000

    def features(self, first, count):
        """Returns ids, int64 of shape (count, NUM_FIELDS), and numbers of examples.

        Args:
            first: number of the first example.
            count: how many.
        """
        places, numbers = super().features(first, count)
        time = np.arange(first, first + count)[:, None] / self.life
        generation = (time + hashed(self.seed, _PHASE, places)).astype(np.int64)
        high = hashed(self.seed, _NAME, places + generation * self.num_ids)
        return (high * 2.0**53).astype(np.int64), numbers
