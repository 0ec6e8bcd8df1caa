# Expected last line: 2 workers and 1 server, the loss fell: True
"""Parameter servers in a Ray job, started on the machines of the cluster that runs it.

On a Ray cluster:

    ray job submit --working-dir examples/ray -- python parameter_servers.py

The same line is the entrypoint of a RayJob of KubeRay.
"""

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np


def main():
    x = np.random.default_rng(0).normal(size=(512, 4)).astype("float32")
    y = x @ np.float32([[1], [2], [3], [4]])
    with sg.ParameterServerStrategy(num_workers=2, num_servers=1) as strategy:
        keras.utils.set_random_seed(7)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.1), "mse")
        losses = model.fit(x, y, batch_size=32, epochs=10, verbose=0).history["loss"]
    print(f"2 workers and 1 server, the loss fell: {losses[-1] < 0.2 * losses[0]}")


if __name__ == "__main__":
    main()
