"""Digests of assigned values: any bit counts, and a digest takes no copy from an accelerator."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.keras.variables.copied_assignments import _digest, _digest_on_device


@pytest.mark.parametrize("digest", [_digest, _digest_on_device], ids=["host", "device"])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64"]
)
def test_any_change_changes_the_digest(dtype: str, digest: Any) -> None:
    value = np.asarray([[1, 0, 1], [0, 1, 1]]).astype(jnp.dtype(dtype))
    seen = {int(digest(jnp.asarray(value)))}
    for place in np.ndindex(value.shape):
        changed = value.copy()
        changed[place] = not changed[place]
        seen.add(int(digest(jnp.asarray(changed))))
    seen.add(int(digest(jnp.asarray(value[::-1]))))
    assert len(seen) == 1 + value.size + 1
    assert digest(jnp.asarray(value)) == digest(jnp.asarray(value.copy()))
    _ = int(digest(jnp.zeros((0, 3), dtype))), int(digest(jnp.ones((), dtype)))


def test_digests_of_the_host_are_those_of_its_devices() -> None:
    value = np.arange(6, dtype="float32").reshape(2, 3)
    on_device = jax.device_put(value, jax.devices("cpu")[0])
    assert _digest(value) == _digest(on_device) == _digest(np.asfortranarray(value))
    assert _digest(None) is None
