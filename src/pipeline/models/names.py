"""One name for each tensor of a model, which transformers uses when it loads the file.

This module imports no heavy library, and reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

HEAD = "lm_head.weight"

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_OUTER = re.compile(r"^(?:(?:module|base_model\.model)\.)+")  # DDP's, DeepSpeed's and PEFT's
_FACTORS = re.compile(
    r"\.base_layer(?=\.)|\.lora_[AB](?:\.(?!weight$|bias$)\w+)?(?=\.|$)|\.modules_to_save(?=\.)"
)
# Buffers that older versions stored, and heads of later tokens, which transformers ignores
_COMPUTED = re.compile(
    r"rotary_emb\w*\.(original_)?(inv_freq|cos_cached|sin_cached)$"
    r"|\.(attn|attention)\.(masked_)?bias$"
    r"|\bembed_positions\.weights$|^(model\.)?mtp\."
)
_LATER_HEAD = re.compile(r"^(model\.)?mtp\.")
# The decoder of a model that also sees or hears
_DECODER = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")
_BARE_LAYER = re.compile(r"^(?:decoder\.)?(layers|h|blocks)\.\d+\.")
_EMBEDDING = re.compile(r"\b(embed_tokens|wte|word_embeddings|embed_in)\.weight$")


def unwrapped(name: str) -> str:
    """Return a name without the prefixes of torch.compile, FSDP, DDP and PEFT."""
    return _OUTER.sub("", _WRAPPERS.sub("", name))


def plain_name(name: str) -> str:
    """Return the name of the base model's parameter that a PEFT-wrapped name belongs to."""
    return _FACTORS.sub("", unwrapped(name))


def is_computed(name: str) -> bool:
    """Return True if transformers computes or ignores a stored tensor of this name."""
    return bool(_COMPUTED.search(unwrapped(name)))


def is_later_head(name: str) -> bool:
    """Return True for a tensor of a head that predicts later tokens, as in Qwen 3.5."""
    return bool(_LATER_HEAD.match(unwrapped(name)))


def is_embedding(name: str) -> bool:
    """Return True for the matrix of the tokens' embeddings."""
    return bool(_EMBEDDING.search(name))


def has_row_per_token(name: str) -> bool:
    """Return True for the embedding and the output head, which grow with the vocabulary."""
    return name == HEAD or is_embedding(name)


def decoder_name(name: str) -> str:
    """Return a parameter's name in the decoder alone.

    For model.language_model.layers.0... it is model.layers.0...
    """
    # GPT-NeoX's files name the head embed_out
    inner, wrapped = _DECODER.subn("", re.sub(r"^embed_out\.", "lm_head.", name))
    if wrapped and not inner.startswith("lm_head."):
        return f"model.{inner}"
    return inner


def is_of_decoder(name: str) -> bool:
    """Return True for a parameter of the decoder of a model that also sees or hears.

    The output head is not included.
    """
    return bool(_DECODER.match(name))


def tensor_names(stored: Iterable[str]) -> dict[str, str]:
    """Return the one name of each tensor of a whole model, by its name in a file or in memory.

    It is the name of the parameter in transformers' model: without wrappers, with the inner model's
    prefix even if the file leaves it out (BLOOM and GPT-2 on the Hub), model.language_model. for
    the decoder of a model that also sees or hears, and lm_head for the output head. Tensors that
    are computed are left out.
    """
    plain = {}
    for name in stored:
        if not is_computed(name):
            plain[name] = unwrapped(name)
    sees = any(map(is_of_decoder, plain.values()))
    bare = next(filter(None, map(_BARE_LAYER.match, plain.values())), None)
    prefix = ""
    if bare:
        prefix = "transformer."
        if "embed_in.weight" in plain.values():
            prefix = "gpt_neox."
        if bare[1] == "layers" and prefix != "gpt_neox.":
            prefix = "model."
    return {name: _renamed(text, sees, prefix) for name, text in plain.items()}


def _renamed(name: str, sees: bool, prefix: str) -> str:
    text = decoder_name(name)
    if text.startswith("lm_head.") or not (sees or prefix):
        return text
    if is_of_decoder(name):
        return text.replace("model.", "model.language_model.", 1)
    if sees:
        return re.sub(r"^(?:model\.)?", "model.", text).replace(".vision_model.", ".")
    return prefix + text


def embedding_beside(names: Iterable[str], model_type: str) -> str:
    """Return the name of the embedding in a model that only stores the tied output head.

    Args:
        names: the model's tensors.
        model_type: the type in config.json.
    """
    in_layer = re.compile(r"(.*?)\b(layers|h|blocks)\.\d+\.")
    match = next(filter(None, map(in_layer.match, names)))
    stem, layers = match.groups()
    embedding = "wte"
    if stem == "gpt_neox." and layers == "layers":
        embedding = "embed_in"
    elif layers == "layers":
        embedding = "embed_tokens"
    elif model_type in ("bloom", "falcon"):
        embedding = "word_embeddings"
    return f"{stem}{embedding}.weight"
