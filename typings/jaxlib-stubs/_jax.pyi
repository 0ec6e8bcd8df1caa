# jaxlib describes its compiled module no more (0.10), so that `jax.Device` would be unknown to
# pyright, and with it every signature of ours that names it. Only what we use stands here.
from typing import Any

class Device:
    id: int
    platform: str
    device_kind: str
    process_index: int
    def memory_stats(self) -> dict[str, int] | None: ...

def __getattr__(name: str) -> Any: ...
