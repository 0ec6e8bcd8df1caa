"""The models of this example: each with its data, its training and its measure of quality."""

import dataclasses

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np

from examples.clicks.law import HELD_OUT, ClickLaw, area_under_curve
from examples.recommenders import ranking, retrieval, sequences


class Clicks:
    """Prediction of clicks by DLRM or DCN-v2, measured by AUC.

    Args:
        model: one of `ranking.MODELS`.
        num_ids: rows of a table with a vocabulary.
    """

    metric = "AUC"
    eviction = None

    def __init__(self, model="dlrm", num_ids=100_000):
        self._model = model
        self._law = ClickLaw(num_ids)

    def build(self, tables):
        """Returns a compiled model; call in the scope of the strategy."""
        model = ranking.build(self._model, tables, self._law.num_ids)
        model.compile(
            keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.01),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
        return model

    def batches(self, tables, batch_size, first=0):
        """Yields batches without end."""
        while True:
            yield self._batch(tables, first, batch_size)
            first += batch_size

    def _batch(self, tables, first, count):
        features, labels = self._law.examples(first, count)
        return {**features, "ids": tables.ids(features["ids"])}, labels

    def quality(self, model, tables, num_examples, num_trained):
        """Returns the AUC on held-out examples, and that of the true probabilities."""
        features, labels = self._batch(tables, self._held_out(num_trained), num_examples)
        scores = model.predict(features, batch_size=2_048, verbose=0)
        truth, _ = self._law.features(self._held_out(num_trained), num_examples)
        best = self._law.probabilities(truth, features["numbers"])
        return area_under_curve(labels, scores), area_under_curve(labels, best)

    def _held_out(self, num_trained):
        del num_trained
        return HELD_OUT


class DriftingClicks(Clicks):
    """Clicks on items that come and go, by DLRM; the next examples of the stream are the test.

    Rows of items that are gone are evicted.

    Args:
        num_ids: items at a time.
        life: examples until an item is replaced.
    """

    eviction = sg.embedding.NotSeenFor(1_000)

    def __init__(self, num_ids=20_000, life=1_000_000):
        super().__init__("dlrm", num_ids)
        self._law = ranking.DriftingLaw(num_ids, life=life)

    def _held_out(self, num_trained):
        return num_trained


@dataclasses.dataclass
class Choices:
    """Retrieval by two towers, measured by the recall of 50 items."""

    law: retrieval.ChoiceLaw = dataclasses.field(default_factory=retrieval.ChoiceLaw)
    metric = "recall@50"
    eviction = None
    k = 50

    def build(self, tables):
        """Returns a compiled model; call in the scope of the strategy."""
        model = retrieval.TwoTowers(tables, self.law)
        model.compile(keras.optimizers.Adam(0.01), given_losses)
        return model

    def batches(self, tables, batch_size, first=0):
        """Yields batches without end."""
        logs = np.log(self.law.frequencies())
        while True:
            users, items = self.law.examples(first, batch_size)
            first += batch_size
            features = {
                "users": tables.ids(users),
                "items": tables.ids(items),
                "names": items.astype(np.int32),
                "log_frequencies": logs[items],
            }
            yield features, np.zeros(batch_size, np.float32)

    def quality(self, model, tables, num_examples, num_trained):
        """Returns the recall on held-out examples, and the best possible one."""
        del num_trained
        users, items = self.law.examples(retrieval.HELD_OUT, num_examples)
        of_users = vectors(model.users, tables.ids(users))
        of_items = vectors(model.items, tables.ids(np.arange(self.law.num_items)))
        reached = retrieval.recall(of_users @ of_items.T, items, self.k)
        return reached, self.law.best_recall(num_examples, self.k)


@dataclasses.dataclass
class Sessions:
    """Next items of sessions, measured by the recall of 20 items."""

    law: sequences.SessionLaw = dataclasses.field(default_factory=sequences.SessionLaw)
    num_candidates: int = 1_024
    metric = "recall@20"
    eviction = None
    k = 20

    def build(self, tables):
        """Returns a compiled model; call in the scope of the strategy."""
        model = sequences.SessionModel(tables, self.law)
        model.compile(keras.optimizers.Adam(0.01), given_losses)
        return model

    def batches(self, tables, batch_size, first=0):
        """Yields batches without end."""
        while True:
            sessions, _ = self.law.examples(first, batch_size)
            candidates = self.law.candidates(first // batch_size, self.num_candidates)
            first += batch_size
            own = tables.ids(candidates)
            features = {
                "sessions": tables.ids(sessions[:, :-1]),
                "items": tables.ids(sessions[:, -1]),
                "candidates": np.broadcast_to(own, (batch_size, *own.shape)),
                "is_hit": candidates[None] == sessions[:, -1:],
            }
            yield features, np.zeros(batch_size, np.float32)

    def quality(self, model, tables, num_examples, num_trained):
        """Returns the recall on held-out sessions, and the best possible one."""
        del num_trained
        sessions, _ = self.law.examples(sequences.HELD_OUT, num_examples)
        of_sessions = vectors(model.sessions, tables.ids(sessions[:, :-1]))
        items = np.arange(self.law.num_items)
        of_items = vectors(model.outputs, tables.ids(items))
        logs, hits = self.law.log_frequencies(items), 0
        for first in range(0, num_examples, 256):
            scores = of_sessions[first : first + 256] @ of_items.T + logs
            last = sessions[first : first + 256, -1]
            hits += retrieval.recall(scores, last, self.k) * len(last)
        return hits / num_examples, self.law.best_recall(num_examples, self.k)


def given_losses(_, losses):
    """Returns the losses that a model computes itself."""
    return losses


def vectors(layer, ids, batch_size=8_192):
    """Returns what a part of a model makes of ids, in batches.

    Args:
        layer: a function of ids.
        ids: of any number of examples.
        batch_size: of each call.
    """
    starts = range(0, len(ids), batch_size)
    parts = [np.asarray(layer(ids[first : first + batch_size])) for first in starts]
    return np.concatenate(parts)


TASKS = {
    "dlrm": lambda: Clicks("dlrm"),
    "dcn": lambda: Clicks("dcn"),
    "drift": DriftingClicks,
    "two_towers": Choices,
    "sessions": Sessions,
}
