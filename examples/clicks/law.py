"""Clicks that follow a stated law, made as they are asked for; nothing of them is ever kept.

An example has `NUM_FIELDS` ids, one of each field, `NUM_NUMBERS` numbers, and a label, 0 or 1.

Ids. All fields share one table of `num_ids` rows: each has a range of ids of its own, whose part of
the table is in `SHARES`. In a field of n ids the one of rank r = 0, 1, ..., n - 1 has probability
F(r + 1) - F(r), where F(r) = (1 - (r + 1)^(1 - s)) / (1 - (n + 1)^(1 - s)) and s = `EXPONENT`:
close to Zipf's law, (r + 1)^(-s). Rank r is the id (2654435761 r + 40503) mod n of the field, so
that what is popular is spread over the table. Fields are independent of one another.

Numbers. Independent, even from -sqrt(3) to sqrt(3), so of mean 0 and variance 1.

Label. 1 with probability 1 / (1 + exp(-z)), where

    z = BIAS + sum_f w(i_f) + sum_{f < g} v(i_f) . v(i_g) + sum_j SLOPES_j x_j

i_f is the id of field f, x_j the j-th number, w(i) a number and v(i) a vector of `NUM_FACTORS`
numbers. All of these are hashes of the id, even from -sqrt(3) d to sqrt(3) d with d =
`WEIGHT_DEVIATION` and `FACTOR_DEVIATION`: so there is no table of the truth.

Randomness. Whatever is random is `hashed(seed, stream, number)`: a hash of the seed, of what it is
for, and of the number of the example (or of the id, for w and v). So example n is the same whoever
asks for it, and whenever. Examples from `HELD_OUT` on are the held-out part; those before it are
trained on.
"""

import dataclasses
import math

import numpy as np

SHARES = (0.5, 0.25, 0.15, 0.07, 0.02, 0.0075, 0.002, 0.0005)
NUM_FIELDS = len(SHARES)
SLOPES = (0.6, -0.5, 0.4, 0.3)
NUM_NUMBERS = len(SLOPES)
NUM_FACTORS = 2
EXPONENT = 1.3
BIAS = -1.0
WEIGHT_DEVIATION = 0.5
FACTOR_DEVIATION = 0.3
HELD_OUT = 2**40

# What each hash is for; fields, numbers and factors count on from theirs.
_IDS, _NUMBERS, _LABEL, _WEIGHT, _FACTORS = 0, 100, 200, 300, 400
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SPREAD, _SHIFT = 2_654_435_761, 40_503


def hashed(seed, stream, numbers):
    """Returns float64, even between 0 and 1, of any number: by splitmix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        start = _mixed(np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream))
        bits = _mixed(
            (np.asarray(numbers).astype(np.uint64) + start) * np.uint64(0x9E3779B97F4A7C15)
        )
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits):
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@dataclasses.dataclass(frozen=True)
class ClickLaw:
    """The law of the module, for a table of some size.

    Args:
        num_ids: rows of the table.
        seed: of everything that is random.
    """

    num_ids: int = 25_000_000
    seed: int = 0

    @property
    def field_sizes(self):
        """How many ids each field has; they add up to `num_ids`."""
        sizes = [max(2, int(share * self.num_ids)) for share in SHARES[1:]]
        return (self.num_ids - sum(sizes), *sizes)

    def features(self, first, count):
        """Returns ids, int32 of shape (count, NUM_FIELDS), and numbers, float32, of examples.

        Args:
            first: number of the first example.
            count: how many.
        """
        which = np.arange(first, first + count)
        ids = np.empty((count, NUM_FIELDS), np.int32)
        begin = 0
        for field, size in enumerate(self.field_sizes):
            ranks = _ranks(hashed(self.seed, _IDS + field, which), size)
            ids[:, field] = begin + (_SPREAD * ranks + _SHIFT) % size
            begin += size
        numbers = np.empty((count, NUM_NUMBERS), np.float32)
        for place in range(NUM_NUMBERS):
            numbers[:, place] = _even(hashed(self.seed, _NUMBERS + place, which), 1.0)
        return ids, numbers

    def logits(self, ids, numbers):
        """Returns z of examples, float64 of shape (count,).

        Args:
            ids: of the examples.
            numbers: of the examples.
        """
        z = BIAS + numbers.astype(np.float64) @ np.asarray(SLOPES)
        z += _even(hashed(self.seed, _WEIGHT, ids), WEIGHT_DEVIATION).sum(1)
        for factor in range(NUM_FACTORS):
            v = _even(hashed(self.seed, _FACTORS + factor, ids), FACTOR_DEVIATION)
            z += (v.sum(1) ** 2 - (v**2).sum(1)) / 2  # the sum over all pairs of fields
        return z

    def probabilities(self, ids, numbers):
        """Returns the probabilities of a click: no prediction has a larger expected AUC.

        Args:
            ids: of the examples.
            numbers: of the examples.
        """
        return 1 / (1 + np.exp(-self.logits(ids, numbers)))

    def examples(self, first, count):
        """Returns {"ids", "numbers"} and the labels, float32 of shape (count,), of examples.

        Args:
            first: number of the first example.
            count: how many.
        """
        ids, numbers = self.features(first, count)
        chances = hashed(self.seed, _LABEL, np.arange(first, first + count))
        labels = (chances < self.probabilities(ids, numbers)).astype(np.float32)
        return {"ids": ids, "numbers": numbers}, labels

    def training(self, batch_size, *, part=0, num_parts=1):
        """Yields batches to train on, as `examples` returns them, without end.

        Args:
            batch_size: examples in each.
            part: which of the batches: `part`, `part + num_parts`, and so on.
            num_parts: how many share the batches.
        """
        for first in range(part * batch_size, HELD_OUT, num_parts * batch_size):
            yield self.examples(first, min(batch_size, HELD_OUT - first))

    def held_out(self, batch_size, num_examples):
        """Yields batches of the held-out part.

        Args:
            batch_size: examples in each; the last may have fewer.
            num_examples: in all.
        """
        for first in range(0, num_examples, batch_size):
            yield self.examples(HELD_OUT + first, min(batch_size, num_examples - first))

    def best_auc(self, num_examples):
        """Returns the AUC of the true probabilities on held-out examples.

        Args:
            num_examples: in all.
        """
        parts = [
            (labels, self.probabilities(features["ids"], features["numbers"]))
            for features, labels in self.held_out(50_000, num_examples)
        ]
        return area_under_curve(*map(np.concatenate, zip(*parts, strict=True)))


def area_under_curve(labels, scores):
    """Returns how often a clicked example has a higher score than another one; ties count half.

    Args:
        labels: 0 or 1, of shape (n,), some of each.
        scores: of shape (n,).
    """
    ordered = np.sort(scores)
    below = np.searchsorted(ordered, scores, side="left")
    not_above = np.searchsorted(ordered, scores, side="right")
    clicked = labels > 0
    count = int(clicked.sum())
    # Mann and Whitney: mean rank of the clicked ones, less what they are among themselves.
    rank_sum = float(((below + not_above + 1) / 2)[clicked].sum())
    return (rank_sum - count * (count + 1) / 2) / (count * (len(labels) - count))


def _ranks(even, size):
    """The rank at which the distribution function reaches a number between 0 and 1."""
    at_end = (size + 1.0) ** (1 - EXPONENT)
    ranks = (1 - even * (1 - at_end)) ** (1 / (1 - EXPONENT)) - 1
    return np.minimum(ranks.astype(np.int64), size - 1)


def _even(even, deviation):
    return (2 * even - 1) * math.sqrt(3) * deviation
