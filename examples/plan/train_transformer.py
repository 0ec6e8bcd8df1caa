"""A transformer of 1.1 billion parameters, to be planned before anybody has a machine for it.

    stratagem plan examples/plan/train_transformer.py --target 8xH100 --picture plan.png

Its data are zeros: how large a step is does not depend on what is trained.
"""

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np
from keras import layers

WIDTH, NUM_HEADS, NUM_BLOCKS = 2048, 16, 20
NUM_TOKENS, LENGTH = 32_000, 1024
BATCH_SIZE_PER_REPLICA = 4


def main():
    keras.config.set_dtype_policy("mixed_bfloat16")
    strategy = sg.MirroredStrategy()
    with strategy.scope():
        model = build_model()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
    text = np.zeros((batch_size, LENGTH), "int32")
    model.fit(text, text, batch_size=batch_size)


def build_model():
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(NUM_TOKENS, WIDTH)(tokens)
    for _ in range(NUM_BLOCKS):
        attention = layers.MultiHeadAttention(NUM_HEADS, WIDTH // NUM_HEADS)
        normal = layers.LayerNormalization()(x)
        x += attention(normal, normal, use_causal_mask=True)
        normal = layers.LayerNormalization()(x)
        x += layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(normal))
    logits = layers.Dense(NUM_TOKENS, dtype="float32")(layers.LayerNormalization()(x))
    return keras.Model(tokens, logits)


if __name__ == "__main__":
    main()
