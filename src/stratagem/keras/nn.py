"""`sg.nn`: the functions of `tf.nn` for distributed training, and losses of large vocabularies.

Source: TF 2.21 nn_impl_distribute.py, embedding_ops.py.
"""

from stratagem.execution.lookups import embedding_lookup
from stratagem.keras.numerics.chunked_loss import (
    ChunkedSparseCategoricalCrossentropy,
    chunked_softmax_cross_entropy,
)
from stratagem.keras.numerics.losses import compute_average_loss as compute_average_loss
from stratagem.keras.numerics.losses import (
    scale_regularization_loss as scale_regularization_loss,
)

__all__ = [
    "ChunkedSparseCategoricalCrossentropy",
    "chunked_softmax_cross_entropy",
    "embedding_lookup",
]
