"""The same calls as digits.R, from Python."""

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
from sklearn.datasets import load_digits

x_train, y_train = load_digits(return_X_y=True)
x_train = x_train / 16

strategy = sg.MultiWorkerMirroredStrategy()  # without TF_CONFIG as sg.MirroredStrategy()
keras.utils.set_random_seed(7)

with strategy.scope():
    model = keras.Sequential()
    model.add(keras.layers.Input((64,)))
    model.add(keras.layers.Dense(256, activation="relu"))
    model.add(keras.layers.Dropout(0.4))
    model.add(keras.layers.Dense(128, activation="relu"))
    model.add(keras.layers.Dropout(0.3))
    model.add(keras.layers.Dense(10, activation="softmax"))

model.compile(loss="sparse_categorical_crossentropy", optimizer="rmsprop", metrics=["accuracy"])

history = model.fit(x_train, y_train, epochs=15, batch_size=128, validation_split=0.2, verbose=0)

accuracy = history.history["val_accuracy"][-1]
print(f"{strategy.num_replicas_in_sync} replicas, validation accuracy {accuracy:.2f}")
