"""Llama 3 and DeepSeek-V3 as parameter shapes: what the memory report and its proof are tried on.

The modules hold the parameters of the published models, under the names of their reference code and in its
order, and have no forward pass. Build them on the meta device, where a model of any size costs nothing:

    PYTHONPATH=benchmarks python -m torchft.local_sgd_memory model_shapes:llama3_405b --shards 512

The totals are derived, not copied: the modules below follow the published configurations (``params.json`` of
Llama 3, ``config.json`` of DeepSeek-V3), and counting what they hold gives exactly the published numbers
8,030,261,248, 70,553,706,496 and 405,853,388,800. Of DeepSeek-V3, published as 671B, the 671,026,419,200 are
the main model without the multi-token prediction module (a 62nd layer). They count the routing biases of the
58 mixture-of-experts layers, 14,848 in all, which the published checkpoint holds as tensors of their own;
without them they are 671,026,404,352.
"""

from __future__ import annotations

import torch
from torch import nn

PUBLISHED_TOTALS = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "deepseek_v3_671b": 671_026_419_200,
    "deepseek_v3_671b_separate_experts": 671_026_419_200,
}


class Shaped(nn.Module):
    """A module with one parameter ``weight``.

    Args:
        sizes: its shape.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sizes))


class FeedForward(nn.Module):
    """SwiGLU: three matrices."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = Shaped(hidden, dim)
        self.w2 = Shaped(dim, hidden)
        self.w3 = Shaped(hidden, dim)


class LlamaAttention(nn.Module):
    """Grouped-query attention with heads of 128."""

    def __init__(self, dim: int, kv_heads: int) -> None:
        super().__init__()
        self.wq = Shaped(dim, dim)
        self.wk = Shaped(kv_heads * 128, dim)
        self.wv = Shaped(kv_heads * 128, dim)
        self.wo = Shaped(dim, dim)


class LlamaLayer(nn.Module):
    """One decoder layer of Llama 3."""

    def __init__(self, dim: int, hidden: int, kv_heads: int) -> None:
        super().__init__()
        self.attention = LlamaAttention(dim, kv_heads)
        self.feed_forward = FeedForward(dim, hidden)
        self.attention_norm = Shaped(dim)
        self.ffn_norm = Shaped(dim)


class Llama(nn.Module):
    """Llama 3: token embedding, layers, norm and an untied output matrix."""

    def __init__(self, dim: int, hidden: int, layers: int, kv_heads: int = 8, vocab: int = 128_256) -> None:
        super().__init__()
        self.tok_embeddings = Shaped(vocab, dim)
        self.layers = nn.ModuleList([LlamaLayer(dim, hidden, kv_heads) for _ in range(layers)])
        self.norm = Shaped(dim)
        self.output = Shaped(vocab, dim)


def llama3_8b() -> nn.Module:
    """Llama 3 8B: 8,030,261,248 parameters in 291 tensors."""
    return Llama(dim=4096, hidden=14_336, layers=32)


def llama3_70b() -> nn.Module:
    """Llama 3 70B: 70,553,706,496 parameters in 723 tensors."""
    return Llama(dim=8192, hidden=28_672, layers=80)


def llama3_405b() -> nn.Module:
    """Llama 3.1 405B: 405,853,388,800 parameters in 1,137 tensors."""
    return Llama(dim=16_384, hidden=53_248, layers=126)


class LatentAttention(nn.Module):
    """Multi-head latent attention of DeepSeek-V3: 128 heads, queries and keys/values of low rank."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        heads, no_rope, rope, value, query_rank, kv_rank = 128, 128, 64, 128, 1536, 512
        self.wq_a = Shaped(query_rank, dim)
        self.q_norm = Shaped(query_rank)
        self.wq_b = Shaped(heads * (no_rope + rope), query_rank)
        self.wkv_a = Shaped(kv_rank + rope, dim)
        self.kv_norm = Shaped(kv_rank)
        self.wkv_b = Shaped(heads * (no_rope + value), kv_rank)
        self.wo = Shaped(dim, heads * value)


class Gate(nn.Module):
    """Router over the experts, with the bias that balances their load."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.bias = nn.Parameter(torch.empty(experts))


class GroupedExperts(nn.Module):
    """All routed experts of a layer in three tensors, as grouped matrix multiplication takes them."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(experts, hidden, dim))


class MixtureOfExperts(nn.Module):
    """256 routed experts and one shared one."""

    def __init__(self, dim: int, hidden: int, grouped: bool) -> None:
        super().__init__()
        experts = 256
        self.gate = Gate(dim, experts)
        self.experts = (
            GroupedExperts(dim, hidden, experts)
            if grouped
            else nn.ModuleList([FeedForward(dim, hidden) for _ in range(experts)])
        )
        self.shared_experts = FeedForward(dim, hidden)


class DeepSeekLayer(nn.Module):
    """One decoder layer of DeepSeek-V3, dense or mixture of experts."""

    def __init__(self, dim: int, dense: bool, grouped: bool) -> None:
        super().__init__()
        self.attn = LatentAttention(dim)
        self.ffn = FeedForward(dim, 18_432) if dense else MixtureOfExperts(dim, 2048, grouped)
        self.attn_norm = Shaped(dim)
        self.ffn_norm = Shaped(dim)


class DeepSeek(nn.Module):
    """DeepSeek-V3 without its multi-token prediction module: 3 dense layers, 58 with experts."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        dim, vocab = 7168, 129_280
        self.embed = Shaped(vocab, dim)
        self.layers = nn.ModuleList([DeepSeekLayer(dim, index < 3, grouped) for index in range(61)])
        self.norm = Shaped(dim)
        self.head = Shaped(vocab, dim)


def deepseek_v3_671b() -> nn.Module:
    """DeepSeek-V3: 671,026,419,200 parameters, the experts of a layer in three tensors."""
    return DeepSeek(grouped=True)


def deepseek_v3_671b_separate_experts() -> nn.Module:
    """DeepSeek-V3: 671,026,419,200 parameters, each expert in three tensors of its own."""
    return DeepSeek(grouped=False)
