"""Sizes of Transformers, and the FLOPs of a trained token. Imports only the standard library."""

from __future__ import annotations

import dataclasses

__all__ = ["LlamaSizes", "TransformerSizes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerSizes:
    """Sizes of a Transformer."""

    width: int
    num_heads: int
    num_blocks: int
    length: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaSizes(TransformerSizes):
    """Sizes of a Llama.

    Args:
        num_kv_heads: heads of keys and values.
        inner_width: of the feed-forward layers.
        is_tied: True if the logits use the token embedding.
        lora_rank: of the trained matrices beside queries and values; 0 to train everything.
    """

    num_kv_heads: int
    inner_width: int
    is_tied: bool
    lora_rank: int = 0

    @property
    def num_multiplied(self) -> int:
        """Weights that each token is multiplied by: all but an embedding that is only looked up."""
        key_width = self.num_kv_heads * self.width // self.num_heads
        block = 2 * self.width * (self.width + key_width) + 3 * self.width * self.inner_width
        norms = (2 * self.num_blocks + 1) * self.width
        return self.num_blocks * block + norms + self.num_tokens * self.width

    @property
    def num_lora_weights(self) -> int:
        """Numbers in the matrices of LoRA."""
        key_width = self.num_kv_heads * self.width // self.num_heads
        return self.num_blocks * self.lora_rank * (3 * self.width + key_width)

    @property
    def flops_per_token(self) -> int:
        """FLOPs of training on one token, without recomputation.

        A trained weight takes 6: 2 each forward, for the gradient of its input, and for its own. A
        frozen weight lacks the last. Source: Chowdhery et al. 2022, PaLM, appendix B:
        6 N + 12 L H Q T; the reduction for frozen weights follows from its derivation.
        """
        attention = 12 * self.num_blocks * self.width * self.length
        weights = 6 * self.num_multiplied
        if self.lora_rank:
            weights = 4 * self.num_multiplied + 6 * self.num_lora_weights
        return weights + attention
