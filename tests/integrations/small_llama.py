"""The small random model that the runs of vLLM share.

python tests/integrations/small_llama.py FOLDER     # one with a tokenizer, for servers of vLLM
"""

from __future__ import annotations

import sys
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


def model_of(seed: int, **sizes: int):
    """A small random Llama, in float32; `sizes` replace those of CONFIG."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**CONFIG | sizes)).float().eval()


def make_model(folder: Path, **sizes: int) -> None:
    """Write a small random Llama."""
    model_of(1, **sizes).save_pretrained(folder)


def make_tokenizer(folder: Path) -> int:
    """Write a tokenizer that makes a token of each byte; return the number of its tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE(vocab={word: k for k, word in enumerate(words)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=bytewise, **marks).save_pretrained(folder)
    return len(words)


def main(argv: list[str]) -> int:
    """Write a model and its tokenizer."""
    (folder,) = map(Path, argv)
    nwords = make_tokenizer(folder)
    make_model(folder, vocab_size=nwords, bos_token_id=0, eos_token_id=1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
