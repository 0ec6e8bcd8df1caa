"""Opens a saved model in a process in which Stratagem is never imported, and writes its logits.

python -m validation.third_party.open_decoder model.keras logits.npy
"""

from __future__ import annotations

import sys

import keras
import numpy as np

from validation.third_party.programs.keras_hub_sharded import rows


def main(path: str, output: str) -> None:
    """Writes the predictions of the model on the rows of the tests."""
    model = keras.saving.load_model(path)
    if "stratagem" in sys.modules:
        raise RuntimeError("A program imports stratagem: its numbers are not plain.")
    np.save(output, model.predict(rows()[0], verbose=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
