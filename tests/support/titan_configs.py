"""TorchTitan configurations that train on a CPU: a tiny Llama 3, a tiny tokenizer and a tiny data set.

A ``config_registry`` as a user would write one. TorchTitan's wheel has neither tokenizer nor data set, and
its own debug model can't train here: FlexAttention has no backward on the CPU, healing a fused QKV
projection hangs with several Gloo ranks, and Gloo lacks the pre-multiplied sum of FSDP2's gradient reduction.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.experiments.torchft.llama3.config_registry import llama3_torchft_debugmodel
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer as TitanTrainer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers, llama3_configs, parallelize_llama

from torchft.titan.trainer import FaultTolerantTrainer, with_local_sgd_offload

DIM = 32
VOCABULARY = 260


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one token per byte, as TorchTitan reads it from ``--hf_assets_path``."""
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def _texts(path: str) -> Dataset:
    source = random.Random(0)
    words = ["local", "replica", "quorum", "commit", "average", "window", "host", "step"]
    return Dataset.from_list([{"text": " ".join(source.choices(words, k=40))} for _ in range(64)])


DATASETS["tiny"] = DatasetConfig(path="tiny", loader=_texts, sample_processor=lambda sample: sample["text"])


def _model() -> Llama3Model.Config:
    debug = llama3_configs["debugmodel"](attn_backend="flex")
    assert isinstance(debug.layers[0].attention.rope, ComplexRoPE.Config)
    layers = _build_llama3_layers(
        n_layers=2,
        dim=DIM,
        n_heads=2,
        hidden_dim=2 * DIM,
        rope=replace(debug.layers[0].attention.rope, dim=DIM // 2),
        fuse_qkv=False,
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return replace(
        debug,
        dim=DIM,
        vocab_size=VOCABULARY,
        tok_embeddings=replace(debug.tok_embeddings, num_embeddings=VOCABULARY, embedding_dim=DIM),
        norm=replace(debug.norm, normalized_shape=DIM),
        lm_head=replace(debug.lm_head, in_features=DIM, out_features=VOCABULARY),
        layers=layers,
    )


def _parallelize(model: Any, **kwargs: Any) -> torch.nn.Module:
    model = parallelize_llama(model, **kwargs)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def titan() -> TitanTrainer.Config:
    """For TorchTitan's own trainer."""
    config = llama3_torchft_debugmodel()
    assert config.model_spec is not None
    config.model_spec = replace(config.model_spec, model=_model(), parallelize_fn=_parallelize)
    config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="tiny", dataset_path="tiny")
    config.training = replace(
        config.training, local_batch_size=2, seq_len=32, mixed_precision_param="float32"
    )
    return config


def staging() -> FaultTolerantTrainer.Config:
    """The same for the trainer that knows the flag."""
    return with_local_sgd_offload(titan())
