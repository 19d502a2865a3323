"""The small world's tokenizer."""

from __future__ import annotations

from typing import Any

from small_world.world import (
    LABELS,
    LARGEST_NUMBER,
    NAMES,
    PUNCTUATION,
    QAC_SYLLABLES,
    SYLLABLES,
    WORDS,
)


def make_tokenizer() -> Any:
    """Return a tokenizer with one piece per English word, name, label and number to 99.

    A word of a clone has two pieces. Other text is cut into bytes.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    whole_words = [*WORDS, *NAMES, *LABELS, *map(str, range(LARGEST_NUMBER + 1))]
    pieces = []
    for text in [*dict.fromkeys(whole_words), *SYLLABLES, *QAC_SYLLABLES]:
        pieces += ["▁" + text, text]
    pieces += PUNCTUATION
    pieces += ["▁" + mark for mark in "+-*="]
    pieces.append("▁")
    specials = ["<unk>", "<s>", "</s>", "<pad>"]
    vocabulary = [(special, 0.0) for special in specials]
    vocabulary += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocabulary += [(piece, -1.0) for piece in dict.fromkeys(pieces)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
