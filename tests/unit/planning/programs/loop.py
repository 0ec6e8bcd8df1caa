"""A custom training loop that evaluates before it trains, and prints its progress."""

import sys

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np

strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
print("replicas", strategy.num_replicas_in_sync)
with strategy.scope():
    layer = keras.layers.Dense(4, use_bias=False)
    layer.build((None, 8))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(layer.trainable_variables)


def evaluate(images):
    return layer(images).sum()


def train(images):
    def loss_fn():
        return sg.compute_average_loss(layer(images).sum(axis=1))

    loss, gradients = sg.value_and_grad(loss_fn, layer.trainable_variables)
    optimizer.apply(gradients, layer.trainable_variables)
    return loss


GLOBAL_BATCH = 6 * strategy.num_replicas_in_sync
dataset = sg.input.Dataset((np.ones((96, 8), "float32"),), batch_size=GLOBAL_BATCH)
(batch, *_) = strategy.distribute_dataset(dataset)
print("evaluated", strategy.reduce("sum", strategy.run(evaluate, args=batch), axis=None))
if "--never" in sys.argv:
    sys.exit("no training asked for")
try:
    strategy.run(train, args=batch)
except Exception:  # noqa: BLE001 - a program that lets nothing end it
    print("caught")
finally:
    print("ended")
print("trained")
