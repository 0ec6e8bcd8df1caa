# Expected last line: Sum of 2 * i for i below 24, in order: True
"""Ports "Distributed Input", https://www.tensorflow.org/tutorials/distribute/input

    python examples/guides/08_input.py

Differences from TensorFlow's guide:

- `sg.input.Dataset` replaces tf.data: arrays, generators and lists of batches. It shuffles and
  batches; `map`, `prefetch` and the like are done before, or by Grain.
- The options of sharding are an argument of `distribute_dataset`, not part of the dataset.
- A loop over a dataset stands outside of the step; several steps in one call are `run_steps`.
- `sg.function` takes no `input_signature`: it compiles once for each kind of batch by itself.
- TensorFlow Transform is left out, and so are Keras's lookup layers, which need
  TensorFlow: `Discretization` is the layer that preprocesses.
"""

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np

# Simulate multiple CPUs with virtual devices
DEVICES = ["cpu:0", "cpu:1"]
strategy = sg.MirroredStrategy(DEVICES)
print("Available devices:")
for i, device in enumerate(strategy.topology.devices):
    print(f"{i}) {device}")

# Distributed datasets
global_batch_size = 16
pairs = (np.ones((100, 1), "float32"), np.ones((100, 1), "float32"))
dataset = sg.input.Dataset(pairs, batch_size=global_batch_size)


@sg.function
def train_step(inputs):
    features, labels = inputs
    return labels - 0.3 * features


for inputs in dataset:
    values = train_step(inputs)
print("Without distribution, the last batch:", values.shape)

# Strategy.experimental_distribute_dataset
mirrored_strategy = sg.MirroredStrategy(DEVICES)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
print(next(iter(dist_dataset)))

# Sharding
options = sg.InputOptions(auto_shard_policy=sg.AutoShardPolicy.DATA)
dataset = sg.input.Dataset(tuple(part[:64] for part in pairs), batch_size=16)
sharded_dataset = mirrored_strategy.experimental_distribute_dataset(dataset, options)
print("Batches:", len(sharded_dataset))


# Strategy.distribute_datasets_from_function
def dataset_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    dataset = sg.input.Dataset(tuple(part[:64] for part in pairs), batch_size=batch_size)
    return dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)


dist_dataset = mirrored_strategy.distribute_datasets_from_function(dataset_fn)
print(next(iter(dist_dataset)))

# Distributed iterators: a for loop
dataset = sg.input.Dataset(pairs, batch_size=global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
for x in dist_dataset:
    loss = mirrored_strategy.run(train_step, args=(x,))
print("Loss is ", loss)

# Distributed iterators: an explicit iterator
num_epochs = 10
steps_per_epoch = 5
for _ in range(num_epochs):
    dist_iterator = iter(dist_dataset)
    for _ in range(steps_per_epoch):
        # next(dist_iterator) does the same.
        loss = mirrored_strategy.run(train_step, args=(dist_iterator.get_next(),))
print("Loss is ", loss)

# The end of the data within several steps
global_batch_size = 4
steps_per_loop = 5
dataset = sg.input.Dataset(np.arange(9), batch_size=global_batch_size)
distributed_iterator = iter(strategy.experimental_distribute_dataset(dataset))


def train_fn(distributed_iterator):
    for _ in range(steps_per_loop):
        optional_data = distributed_iterator.get_next_as_optional()
        if not optional_data.has_value():
            break
        per_replica_results = strategy.run(lambda x: x, args=(optional_data.get_value(),))
        print(strategy.experimental_local_results(per_replica_results))


train_fn(distributed_iterator)

# Using the element_spec property
global_batch_size = 16
dataset = sg.input.Dataset(pairs, batch_size=global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
print(dist_dataset.element_spec)


@sg.function
def train_step_of_spec(per_replica_inputs):
    def step_fn(inputs):
        features, _ = inputs
        return 2 * features

    return mirrored_strategy.run(step_fn, args=(per_replica_inputs,))


for _ in range(5):
    iterator = iter(dist_dataset)
    for _ in range(5):
        output = train_step_of_spec(next(iterator))

# Preprocessing with a custom training loop
with strategy.scope():
    layer = keras.layers.Discretization(bin_boundaries=[10, 20, 30, 40, 50])


def preprocessed_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(4)
    buckets = np.asarray(layer(np.tile([10.0, 30.0, 55.0], 4)))
    dataset = sg.input.Dataset(buckets, batch_size=batch_size)
    return dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)


distributed_dataset = strategy.distribute_datasets_from_function(preprocessed_fn)
distributed_dataset_iterator = iter(distributed_dataset)
for _ in range(3):
    print(next(distributed_dataset_iterator))

# Caveats: outputs in the order of the inputs
dataset_size = 24
batch_size = 6
dataset = sg.input.Dataset(
    (np.arange(dataset_size), np.arange(dataset_size)), batch_size=batch_size
)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)


def predict(index, inputs):
    outputs = 2 * inputs
    return index, outputs


result = {}
for index, inputs in dist_dataset:
    output_index, outputs = mirrored_strategy.run(predict, args=(index, inputs))
    indices = list(mirrored_strategy.experimental_local_results(output_index))
    rindices = []
    for a in indices:
        rindices.extend(np.asarray(a).tolist())
    outputs = list(mirrored_strategy.experimental_local_results(outputs))
    routputs = []
    for a in outputs:
        routputs.extend(np.asarray(a).tolist())
    for i, value in zip(rindices, routputs, strict=True):
        result[i] = value
print(result)


# Tensor inputs instead of a dataset
def value_fn(ctx):
    return np.float32(ctx.replica_id_in_sync_group)


distributed_values = mirrored_strategy.experimental_distribute_values_from_function(value_fn)
for _ in range(4):
    values = mirrored_strategy.run(lambda x: x, args=(distributed_values,))
print(values)


# A generator as the input
def input_gen():
    while True:
        yield np.random.rand(4)


dist_dataset = mirrored_strategy.experimental_distribute_dataset(
    sg.input.Dataset.from_generator(input_gen)
)
iterator = iter(dist_dataset)
for _ in range(4):
    values = mirrored_strategy.run(lambda x: x, args=(next(iterator),))
print(values)

print("Sum of 2 * i for i below 24, in order:", result == {i: 2 * i for i in range(24)})
