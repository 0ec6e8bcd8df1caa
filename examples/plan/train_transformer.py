"""A transformer of 1.1 billion parameters, to be planned before anybody has a machine for it.

    stratagem plan examples/plan/train_transformer.py --target 8xH100 --picture plan.png

With --width 4096 --blocks 32 it has 6.7 billion. Its data are zeros: how large a step is does not
depend on what is trained.
"""

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import argparse

import keras
import numpy as np
from keras import layers

HEAD_SIZE = 128
NUM_TOKENS, LENGTH = 32_000, 1024
BATCH_SIZE_PER_REPLICA = 4


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=20)
    options = parser.parse_args()
    keras.config.set_dtype_policy("mixed_bfloat16")
    strategy = sg.MirroredStrategy()
    with strategy.scope():
        model = build_model(options.width, options.blocks)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
    text = np.zeros((batch_size, LENGTH), "int32")
    model.fit(text, text, batch_size=batch_size)


def build_model(width, num_blocks):
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(NUM_TOKENS, width)(tokens)
    for _ in range(num_blocks):
        attention = layers.MultiHeadAttention(width // HEAD_SIZE, HEAD_SIZE)
        normal = layers.LayerNormalization()(x)
        x += attention(normal, normal, use_causal_mask=True)
        normal = layers.LayerNormalization()(x)
        x += layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(normal))
    logits = layers.Dense(NUM_TOKENS, dtype="float32")(layers.LayerNormalization()(x))
    return keras.Model(tokens, logits)


if __name__ == "__main__":
    main()
