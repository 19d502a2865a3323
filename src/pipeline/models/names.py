"""One name for each tensor of a model, whoever wrote the file: what transformers makes of the names
when it loads them.

Imports nothing heavy, and reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

HEAD = "lm_head.weight"

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_OUTER = re.compile(r"^(?:(?:module|base_model\.model)\.)+")  # of DDP and DeepSpeed, and of PEFT
_FACTORS = re.compile(
    r"\.base_layer(?=\.)|\.lora_[AB](?:\.(?!weight$|bias$)\w+)?(?=\.|$)|\.modules_to_save(?=\.)"
)
# buffers that older versions stored, and heads of later tokens, which transformers passes over
_COMPUTED = re.compile(
    r"rotary_emb\w*\.(original_)?(inv_freq|cos_cached|sin_cached)$|\.(attn|attention)\.(masked_)?bias$"
    r"|\bembed_positions\.weights$|^(model\.)?mtp\."
)
_LATER_HEAD = re.compile(r"^(model\.)?mtp\.")
_DECODER = re.compile(
    r"^(?:model\.)?language_model\.(?:model\.)?"
)  # of a model that also sees or hears
_BARE_LAYER = re.compile(r"^(?:decoder\.)?(layers|h|blocks)\.\d+\.")
_EMBEDDING = re.compile(r"\b(embed_tokens|wte|word_embeddings|embed_in)\.weight$")


def unwrapped(name: str) -> str:
    """Return a name without the prefixes of the objects that held the model: torch.compile's,
    FSDP's, DDP's, PEFT's.
    """
    return _OUTER.sub("", _WRAPPERS.sub("", name))


def plain_name(name: str) -> str:
    """Return the name of the base model's parameter that a PEFT-wrapped name belongs to."""
    return _FACTORS.sub("", unwrapped(name))


def is_computed(name: str) -> bool:
    """Whether transformers computes a stored tensor of this name from config.json, or passes it
    over.
    """
    return bool(_COMPUTED.search(unwrapped(name)))


def is_later_head(name: str) -> bool:
    """Return True for a tensor of a head that predicts later tokens, as Qwen 3.5 has one."""
    return bool(_LATER_HEAD.match(unwrapped(name)))


def is_embedding(name: str) -> bool:
    """Whether this is the matrix of the tokens' embeddings."""
    return bool(_EMBEDDING.search(name))


def has_row_per_token(name: str) -> bool:
    """Whether this is the embedding or the output head, which grow with the vocabulary."""
    return name == HEAD or is_embedding(name)


def decoder_name(name: str) -> str:
    """Return the name that a parameter has in the decoder by itself: model.layers.0... of
    model.language_model.layers.0...
    """
    inner, wrapped = _DECODER.subn(
        "", re.sub(r"^embed_out\.", "lm_head.", name)
    )  # GPT-NeoX has the former in files
    if wrapped and not inner.startswith("lm_head."):
        return f"model.{inner}"
    return inner


def is_of_decoder(name: str) -> bool:
    """Whether this is a parameter of the decoder of a model that also sees or hears, its output
    head aside.
    """
    return bool(_DECODER.match(name))


def tensor_names(stored: Iterable[str]) -> dict[str, str]:
    """Name in a file, or of a parameter in memory -> the tensor's one name.

    Give the names of a whole model at once.

    That is the name of the parameter in transformers' model: without wrappers, with the inner
    model's prefix where the file leaves it out (BLOOM and GPT-2 on the Hub), model.language_model.
    for the decoder of a model that also sees or hears, and lm_head for the output head. Tensors
    that are computed are left out.
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
    """Return the name of the embedding in a model of these names, of which only the tied output
    head is stored.
    """
    stem, layers = next(
        (match[1], match[2])
        for name in names
        if (match := re.match(r"(.*?)\b(layers|h|blocks)\.\d+\.", name))
    )
    if layers == "layers":
        return stem + ("embed_in.weight" if stem == "gpt_neox." else "embed_tokens.weight")
    return stem + ("word_embeddings.weight" if model_type in ("bloom", "falcon") else "wte.weight")
