"""The files of a model's folder: the one list, and which of them is read for what."""

from __future__ import annotations

ADAPTER_CONFIG, ADAPTER_WEIGHTS = (
    "adapter_config.json",
    "adapter_model.safetensors",
)  # as PEFT names them

# Next to the weights: what a merge copies from one of its sources.
BESIDE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
)

# One of these holds the vocabulary of a tokenizer.
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
)

# Next to the weights: what decides a model's answers, and so the key under which scores are cached.
DECIDING = (*BESIDE_WEIGHTS, ADAPTER_CONFIG)

# The files whose digest identifies a folder that is not a run, and texts of a tokenizer that has no
# tokenizer.json. Another suffix would change the hashes of runs.
IDENTIFYING_SUFFIXES = (".json", ".safetensors", ".model", ".jinja")

# What a select run links of the snapshot that it chose: the whole model.
SUFFIXES = (*IDENTIFYING_SUFFIXES, ".txt")

# What is fetched from the Hub; no pickles.
HUB_PATTERNS = [*(f"*{suffix}" for suffix in IDENTIFYING_SUFFIXES), "merges.txt", "vocab.txt"]

# What is left on the Hub: the same weights in other files (Meta's and Mistral's, in float16), and
# in folders (checkpoint-N).
HUB_COPIES = ["*/*", "consolidated*", "*.fp16*"]
