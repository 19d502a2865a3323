"""The files in a model's folder, and their uses."""

from __future__ import annotations

# PEFT's names
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Files next to the weights that a merge copies from a source.
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

# A tokenizer's vocabulary is in one of these files.
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
)

# Files next to the weights that change a model's answers, and so the key of cached scores.
DECIDING = (*BESIDE_WEIGHTS, ADAPTER_CONFIG)

# Files whose digest identifies a folder that is not a run. Another suffix would change run hashes.
IDENTIFYING_SUFFIXES = (".json", ".safetensors", ".model", ".jinja")

# Files of the chosen snapshot that a select run links: the whole model.
SUFFIXES = (*IDENTIFYING_SUFFIXES, ".txt")

# Files that are fetched from the Hub, without pickles.
HUB_PATTERNS = [*(f"*{suffix}" for suffix in IDENTIFYING_SUFFIXES), "merges.txt", "vocab.txt"]

# Copies of the weights that are not fetched: other formats (Meta's, Mistral's, float16), and
# folders (checkpoint-N).
HUB_COPIES = ["*/*", "consolidated*", "*.fp16*"]
