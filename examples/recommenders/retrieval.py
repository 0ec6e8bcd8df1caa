"""Two towers: users and items, each with a vector, whose inner product says who takes what.

Law. A user has `NUM_USER_FIELDS` ids, an item one id of `num_items`. A hash gives each id of a user
a vector, and each item a vector and a popularity; the vector of a user is the sum over its ids. The
item that a user takes is i with probability proportional to exp(a_u . b_i + p_i). No order of items
has a larger expected recall than that by this probability.

Loss. The items of all examples of a step, on all replicas, are the candidates of each example
(`sg.all_gather`). Popular items are candidates more often, so the logarithm of their frequency is
subtracted from their scores (Yi et al., 2019).
"""

import dataclasses

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np
from keras import layers, ops

from examples.clicks.law import hashed

NUM_USER_FIELDS = 3
HELD_OUT = 2**40
_NUM_FACTORS = 8
_USER, _ITEM, _POPULARITY, _IDS, _CHOICE = 0, 100, 200, 300, 400


@dataclasses.dataclass(frozen=True)
class ChoiceLaw:
    """The law of the module.

    Args:
        num_items: items to choose from.
        num_values: ids that each field of a user can have.
        seed: of everything that is random.
    """

    num_items: int = 2_000
    num_values: int = 1_000
    seed: int = 0

    def users(self, first, count):
        """Returns the ids of users, int64 of shape (count, NUM_USER_FIELDS).

        Args:
            first: number of the first example.
            count: how many.
        """
        which = np.arange(first, first + count)
        fields = np.arange(NUM_USER_FIELDS)
        even = np.stack([hashed(self.seed, _IDS + one, which) for one in fields], axis=1)
        return (even**2 * self.num_values).astype(np.int64) + fields * self.num_values

    def scores(self, users):
        """Returns the logarithms of the probabilities of all items, but for a constant of the user.

        Args:
            users: ids of users.

        Returns:
            float32 of shape (len(users), num_items).
        """
        items = np.arange(self.num_items)
        of_users, of_items = np.zeros((len(users), _NUM_FACTORS)), []
        for factor in range(_NUM_FACTORS):
            of_users[:, factor] = _even(hashed(self.seed, _USER + factor, users)).sum(1)
            of_items.append(_even(hashed(self.seed, _ITEM + factor, items)))
        popularity = _even(hashed(self.seed, _POPULARITY, items))
        return (of_users @ np.stack(of_items) * 0.5 + popularity).astype(np.float32)

    def examples(self, first, count):
        """Returns ids of users and the item that each takes.

        Args:
            first: number of the first example.
            count: how many.
        """
        users = self.users(first, count)
        scores = self.scores(users)
        weights = np.cumsum(np.exp(scores - scores.max(1, keepdims=True)), axis=1, dtype=np.float64)
        even = hashed(self.seed, _CHOICE, np.arange(first, first + count))[:, None]
        return users, (weights < even * weights[:, -1:]).sum(1)

    def best_recall(self, num_examples, k):
        """Returns the recall of the k most probable items on held-out examples.

        Args:
            num_examples: in all.
            k: items that are recommended.
        """
        users, items = self.examples(HELD_OUT, num_examples)
        return recall(self.scores(users), items, k)

    def frequencies(self, num_examples=20_000):
        """Returns the part of each item in examples, estimated by their expectation.

        Args:
            num_examples: how many the mean is over.
        """
        total = np.zeros(self.num_items)
        for first in range(0, num_examples, 2_000):
            scores = self.scores(self.users(first, 2_000)).astype(np.float64)
            chances = np.exp(scores - scores.max(1, keepdims=True))
            total += (chances / chances.sum(1, keepdims=True)).sum(0)
        return (total / num_examples).astype(np.float32)


def recall(scores, items, k):
    """Returns how often the item taken is among the k items of the largest scores.

    Args:
        scores: of shape (examples, items).
        items: taken, of shape (examples,).
        k: items that are recommended.
    """
    own = np.take_along_axis(scores, items[:, None], axis=1)
    return float(((scores > own).sum(1) < k).mean())


class TwoTowers(keras.Model):
    """Vectors of users and of items; trained with the candidates of all replicas.

    Args:
        tables: `Tables`, which makes its two tables.
        law: whose numbers of ids tables with a vocabulary have.
    """

    def __init__(self, tables, law):
        super().__init__(name="two_towers")
        self.user_table = tables.make("users", NUM_USER_FIELDS * law.num_values)
        self.item_table = tables.make("items", law.num_items)
        self.user_tower = layers.Dense(tables.width, name="user_tower")
        self.item_tower = layers.Dense(tables.width, name="item_tower")

    def users(self, ids):
        """Returns vectors of users.

        Args:
            ids: of shape (users, NUM_USER_FIELDS), or with the halves of keys.
        """
        return self.user_tower(ops.sum(self.user_table(ids), axis=1))

    def items(self, ids):
        """Returns vectors of items.

        Args:
            ids: of shape (items,), or with the halves of keys.
        """
        return self.item_tower(self.item_table(ids))

    def call(self, features):
        """Returns the loss of each example.

        Args:
            features: a dict of `users`, `items`, their `names` as int32, and `log_frequencies`.
        """
        users, items = self.users(features["users"]), self.items(features["items"])
        names, logs = features["names"], features["log_frequencies"]
        replica = sg.get_replica_context()
        if replica is not None:
            items, all_names, all_logs = replica.all_gather([items, names, logs], axis=0)
        else:
            all_names, all_logs = names, logs
        scores = ops.matmul(users, ops.transpose(items)) - all_logs[None]
        # The item of an example is a candidate once, however many others took it.
        is_own = names[:, None] == all_names[None]
        own = ops.max(ops.where(is_own, scores, -np.inf), axis=1)
        others = ops.logsumexp(ops.where(is_own, -np.inf, scores), axis=1)
        return ops.logaddexp(others, own) - own


def _even(even):
    return (2 * even - 1) * np.sqrt(3)
