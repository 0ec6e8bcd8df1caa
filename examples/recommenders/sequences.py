"""A model of sessions: which of a million items is next.

Law. Items are in clusters. Within a cluster the one of rank r has probability proportional to
about (r + 1)^(-s). A session is a chain of clusters: after cluster c comes one of `_CHANCES`
successors of c, with the probabilities there, or any cluster. So the best possible recommendation
for a session depends on the cluster of its last item alone, and is known; the model sees items, and
has to find the clusters.

Loss. A softmax over a million items costs too much. Items drawn by their frequency are the
candidates of all sessions of a step (Jean et al., 2015). Against these, a score comes to be the
logarithm of the probability of an item over its frequency. A recommendation adds the logarithm of
the frequency, so that an item that was never seen has no high score by chance.
"""

import dataclasses

import stratagem as sg  # noqa: F401  isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np
from keras import layers, ops

from examples.clicks.law import hashed

HELD_OUT = 2**40
_CHANCES = (0.5, 0.25, 0.15)
_EXPONENT = 1.2
_STARTS, _STEPS, _ITEMS, _SUCCESSORS, _CANDIDATES = 0, 100, 200, 300, 400


@dataclasses.dataclass(frozen=True)
class SessionLaw:
    """The law of the module.

    Args:
        num_items: in all.
        num_clusters: of as many items each.
        length: items of a session.
        seed: of everything that is random.
    """

    num_items: int = 1_000_000
    num_clusters: int = 64
    length: int = 8
    seed: int = 0

    @property
    def cluster_items(self):
        """Number of items in a cluster."""
        return self.num_items // self.num_clusters

    def item(self, clusters, ranks):
        """Returns the id of the item of a rank in a cluster.

        Args:
            clusters: numbers of clusters.
            ranks: in them.
        """
        return (clusters + ranks * self.num_clusters) * 7_919 % self.num_items

    def successors(self):
        """Returns the successors of each cluster, of shape (clusters, len(_CHANCES))."""
        order = np.arange(self.num_clusters)
        even = [hashed(self.seed, _SUCCESSORS + one, order) for one in range(len(_CHANCES))]
        return (np.stack(even, axis=1) * self.num_clusters).astype(np.int64)

    def transitions(self):
        """Returns the probability of each cluster after each, of shape (clusters, clusters)."""
        left = 1 - sum(_CHANCES)
        chances = np.full((self.num_clusters, self.num_clusters), left / self.num_clusters)
        for row, successors in enumerate(self.successors()):
            np.add.at(chances[row], successors, _CHANCES)
        return chances

    def examples(self, first, count):
        """Returns sessions, int64 of shape (count, length), and their clusters.

        Args:
            first: number of the first session.
            count: how many.
        """
        which = np.arange(first, first + count)
        ends = np.cumsum(self.transitions(), axis=1)
        clusters = np.empty((count, self.length), np.int64)
        clusters[:, 0] = hashed(self.seed, _STARTS, which) * self.num_clusters
        for place in range(1, self.length):
            even = hashed(self.seed, _STEPS + place, which)
            own = ends[clusters[:, place - 1]]
            clusters[:, place] = (own < even[:, None] * own[:, -1:]).sum(1)
        even = np.stack([hashed(self.seed, _ITEMS + one, which) for one in range(self.length)], 1)
        return self.item(clusters, self._ranks(even)), clusters

    def best_recall(self, num_sessions, k):
        """Returns the recall of the k most probable last items on held-out sessions.

        Args:
            num_sessions: in all.
            k: items that are recommended.
        """
        sessions, clusters = self.examples(HELD_OUT, num_sessions)
        top = min(k, self.cluster_items)
        chances = self.transitions()[:, :, None] * self._rank_chances()[:top]
        best = np.argpartition(-chances.reshape(self.num_clusters, -1), k - 1, axis=1)[:, :k]
        items = self.item(best // top, best % top)
        return float((items[clusters[:, -2]] == sessions[:, -1:]).any(1).mean())

    def candidates(self, step, count):
        """Returns items drawn by frequency for a step.

        Args:
            step: number of the step.
            count: how many.
        """
        which = np.arange(step * count, (step + 1) * count)
        clusters = (hashed(self.seed, _CANDIDATES, which) * self.num_clusters).astype(np.int64)
        return self.item(clusters, self._ranks(hashed(self.seed, _CANDIDATES + 1, which)))

    def log_frequencies(self, items):
        """Returns the logarithms of the frequencies of items, as float32.

        Args:
            items: of any shape.
        """
        inverse = pow(7_919, -1, self.num_items)
        ranks = items * inverse % self.num_items // self.num_clusters
        return np.log(self._rank_chances()[ranks] / self.num_clusters).astype(np.float32)

    def _ranks(self, even):
        at_end = (self.cluster_items + 1.0) ** (1 - _EXPONENT)
        ranks = (1 - even * (1 - at_end)) ** (1 / (1 - _EXPONENT)) - 1
        return np.minimum(ranks.astype(np.int64), self.cluster_items - 1)

    def _rank_chances(self):
        edges = (np.arange(self.cluster_items + 1) + 1.0) ** (1 - _EXPONENT)
        return (edges[:-1] - edges[1:]) / (1 - edges[-1])


class SessionModel(keras.Model):
    """A GRU over the items of a session; trained to tell the last one from candidates.

    Args:
        tables: `Tables`, which makes the tables of inputs and of outputs.
        law: whose number of items tables with a vocabulary have.
    """

    def __init__(self, tables, law):
        super().__init__(name="sessions")
        self.inputs_table = tables.make("inputs", law.num_items)
        self.outputs_table = tables.make("outputs", law.num_items)
        self.recurrent = layers.GRU(2 * tables.width, name="recurrent")
        self.head = layers.Dense(tables.width, name="head")

    def sessions(self, ids):
        """Returns vectors of sessions.

        Args:
            ids: of items, of shape (sessions, length), or with the halves of keys.
        """
        return self.head(self.recurrent(self.inputs_table(ids)))

    def outputs(self, ids):
        """Returns vectors of items.

        Args:
            ids: of shape (items,), or with the halves of keys.
        """
        return self.outputs_table(ids)

    def call(self, features):
        """Returns the loss of each session.

        Args:
            features: a dict of `sessions`, the `items` that follow them, `candidates`, the same in
                each row, and `is_hit`, which is True where a candidate is the item itself.
        """
        vectors = self.sessions(features["sessions"])
        own = ops.sum(vectors * self.outputs(features["items"]), axis=1)
        candidates = self.outputs(features["candidates"][0])
        scores = ops.matmul(vectors, ops.transpose(candidates))
        others = ops.logsumexp(ops.where(features["is_hit"], -np.inf, scores), axis=1)
        return ops.logaddexp(others, own) - own
