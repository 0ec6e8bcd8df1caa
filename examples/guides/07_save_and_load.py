# Expected last line: Accuracy of the saved model: 0.9472, restored: 0.9472, exported: 0.9472
"""Ports "Save and load a model using a distribution strategy",
https://www.tensorflow.org/tutorials/distribute/save_and_load

    python examples/guides/07_save_and_load.py

Differences from TensorFlow's guide:

- scikit-learn's digits of 8 x 8 pixels replace MNIST; it trains for more epochs.
- `model.export` of Keras and `jax.export` replace `tf.saved_model`: what is loaded is a function
  too, which is called with `strategy.run`.
- Loading into a layer of TensorFlow Hub and I/O devices are left out: neither exists without
  TensorFlow.
"""

import os
import tempfile

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

# Where there is no accelerator the CPU counts as two devices; ignored where there is one.
jax.config.update("jax_num_cpu_devices", 2)

keras.utils.set_random_seed(0)
mirrored_strategy = sg.MirroredStrategy()


BATCH_SIZE_PER_REPLICA = 16
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * mirrored_strategy.num_replicas_in_sync


def get_data():
    digits = load_digits()
    images, test_images, labels, test_labels = train_test_split(
        digits.images[..., None], digits.target, test_size=0.2, random_state=0
    )

    def scale(image, label):
        return image.astype(np.float32) / 16, label

    train_dataset = sg.input.Dataset(scale(images, labels), batch_size=BATCH_SIZE, shuffle=True)
    eval_dataset = sg.input.Dataset(scale(test_images, test_labels), batch_size=BATCH_SIZE)
    return train_dataset, eval_dataset


def get_model():
    with mirrored_strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((8, 8, 1)),
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.Adam(),
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
        )
        return model


model = get_model()
train_dataset, eval_dataset = get_data()
model.fit(train_dataset, epochs=8, verbose=2)
_, accuracy = model.evaluate(eval_dataset, verbose=0)

# The Keras API
folder = tempfile.mkdtemp()
keras_model_path = os.path.join(folder, "keras_save.keras")
model.save(keras_model_path)

# Restore the model without a strategy
restored_keras_model = keras.models.load_model(keras_model_path)
_, restored_accuracy = restored_keras_model.evaluate(eval_dataset, verbose=0)
restored_keras_model.fit(train_dataset, epochs=2, verbose=2)

# Restore the model and train it with another strategy
another_strategy = sg.OneDeviceStrategy("/cpu:0")
with another_strategy.scope():
    restored_keras_model_ds = keras.models.load_model(keras_model_path)
    restored_keras_model_ds.fit(train_dataset, epochs=2, verbose=2)

# The lower-level API: a function without the model
exported_path = os.path.join(folder, "exported")
with open(exported_path, "wb") as file:
    batch = jax.export.symbolic_shape("batch, 8, 8, 1")
    function = jax.jit(lambda images: model(images, training=False))
    file.write(jax.export.export(function)(jax.ShapeDtypeStruct(batch, "float32")).serialize())

with open(exported_path, "rb") as file:
    inference_func = jax.export.deserialize(bytearray(file.read())).call

for images, _ in eval_dataset:
    print(inference_func(images).shape)
    break

# Inference in a distributed manner
another_strategy = sg.MirroredStrategy()
with another_strategy.scope():
    dist_predict_dataset = another_strategy.experimental_distribute_dataset(eval_dataset)
    correct = 0
    for images, labels in dist_predict_dataset:
        result = another_strategy.run(inference_func, args=(images,))
        logits = another_strategy.gather(result, axis=0)
        correct += np.sum(np.argmax(logits, axis=1) == another_strategy.gather(labels, axis=0))
exported_accuracy = correct / 360


# Caveats: a subclassed model has to be called or built before it is saved
class SubclassedModel(keras.Model):
    output_name = "output_layer"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._dense_layer = keras.layers.Dense(5, name=self.output_name)

    def call(self, inputs):
        return self._dense_layer(inputs)


with mirrored_strategy.scope():
    my_model = SubclassedModel()
    my_model.compile(optimizer="adam", loss="mean_squared_error")
rows = np.tile(np.arange(5, dtype="float32"), (100, 1))
my_model.fit(sg.input.Dataset((rows, rows), batch_size=8), epochs=2, verbose=2)
my_model.save(os.path.join(folder, "subclassed.keras"))
loaded = keras.models.load_model(
    os.path.join(folder, "subclassed.keras"), custom_objects={"SubclassedModel": SubclassedModel}
)
print(np.allclose(loaded(rows), my_model(rows), atol=1e-5))

print(
    f"Accuracy of the saved model: {accuracy:.4f}, restored: {restored_accuracy:.4f}, "
    f"exported: {exported_accuracy:.4f}"
)
