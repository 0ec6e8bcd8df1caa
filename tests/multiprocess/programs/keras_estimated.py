"""A compiled Keras model as an Estimator, one program for all tasks, as in TensorFlow 1.11.

`python keras_estimated.py FOLDER MAX_STEPS STRATEGY`, as `estimated.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras

import stratagem as sg
from tests.multiprocess.programs import estimated


def compiled_model() -> keras.Model:
    """The classifier of `estimated.model_fn`, by name and by first weights."""
    initializer = keras.initializers.GlorotUniform
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(16, "relu", kernel_initializer=initializer(seed=1), name="dense"),
            keras.layers.Dense(10, kernel_initializer=initializer(seed=2), name="dense_1"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def strategy_of(name: str) -> sg.Strategy:
    """The strategy that trains, made before the model, which starts JAX."""
    if name == "ParameterServerStrategy":
        return sg.ParameterServerStrategy(independent=True)
    return getattr(sg, name)()


def estimator_of(folder: Path, strategy: sg.Strategy) -> sg.estimator.Estimator:
    """The Estimator whose checkpoints are in a folder."""
    distribute = sg.estimator.DistributeConfig(
        train_distribute=strategy, eval_distribute=sg.MirroredStrategy(["cpu:0"])
    )
    config = sg.estimator.RunConfig(
        save_checkpoints_steps=estimated.SAVE_STEPS,
        keep_checkpoint_max=None,
        experimental_distribute=distribute,
    )
    model = compiled_model()
    return sg.estimator.model_to_estimator(model, model_dir=folder / "model", config=config)


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    made = estimator_of(FOLDER, strategy_of(sys.argv[3]))
    estimated.main(made, FOLDER, int(sys.argv[2]))
