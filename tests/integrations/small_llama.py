"""The small random model that the runs of vLLM share."""

from __future__ import annotations

from pathlib import Path

CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # small weights would give the same token whatever the cache holds
    "tie_word_embeddings": False,
}


def model_of(seed: int):
    """A small random Llama, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).float().eval()


def make_model(folder: Path) -> None:
    """Write a small random Llama."""
    model_of(1).save_pretrained(folder)
