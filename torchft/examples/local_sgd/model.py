"""
A small transformer that predicts the next byte of a text.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["VOCABULARY", "ByteTransformer"]

VOCABULARY = 256


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to its input.

    Args:
        dim: width of the model.
        heads: attention heads; divides ``dim``.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.feed_forward(self.feed_forward_norm(x))


class ByteTransformer(nn.Module):
    """Maps bytes to the logits of the byte that follows each.

    Args:
        dim: width of the model.
        layers: number of blocks.
        heads: attention heads per block; divides ``dim``.
        context: longest sequence, in bytes.
    """

    def __init__(self, dim: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        # Near zero, so that training starts at the loss of a uniform guess, ln 256 = 5.55.
        nn.init.normal_(self.head.weight, std=0.002)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Computes logits.

        Args:
            tokens: bytes as integers, [batch, length].

        Returns:
            logits, [batch, length, 256].
        """
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
