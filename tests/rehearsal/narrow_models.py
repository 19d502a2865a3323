"""The papers' models as published on the Hub, but narrow.

True architectures, layers, tokenizer classes, chat templates and files, with random weights of
small width and a small vocabulary.

Answers of random models go on to the limit. Here the output head favours the token that ends an
answer, so that most contexts end it: answers have a few tokens.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl

PIECES = 1100  # of the vocabulary, special tokens aside
SHARDS = 4  # files of weights, as of 8B in bfloat16
ENDING = 0.97  # of random contexts are followed by the end of the answer
# of the weights are 0, which a step moves at any rate: others stay in bfloat16 at rates of a
# warm-up
ZEROS = 0.05

SHIPPED = Path(trl.__file__).parent / "chat_templates"  # the models' own, word by word
LLAMA_CHAT, QWEN_CHAT, COHERE_CHAT, QWEN3_CHAT = (
    (SHIPPED / f"{name}.jinja").read_text(encoding="utf-8")
    for name in ("llama3_1", "qwen2_5", "cohere", "qwen3")
)
FALCON_CHAT = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' +"
    " message['content'] + '\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\n' +"
    " message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{"
    " '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}{% else %}{{ '<|assistant|>\n' "
    " + message['content'] + eos_token }}{% endif %}{% endif %}{% if loop.last and"
    " add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)


@dataclass
class Family:
    """A published model. config: fields of its config.json, special tokens by name; special.

    Its special tokens in the order of their ids; begins: whether the tokenizer puts bos before a
    text.
    """

    tokenizer_class: str
    special: list[str]
    eos: str
    pad: str | None
    bos: str | None
    begins: bool
    chat: Any
    config: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)
    consolidated: bool = False  # Meta's own format beside the weights, original/


LLAMA_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]
COMMON = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "num_key_value_heads": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.43.0.dev0",
}
FALCON = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "activation": "swiglu",
    "attention_bias": False,
    "head_dim": 4,
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_hidden_layers": 28,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000042,
    "tie_word_embeddings": False,
    "transformers_version": "4.46.1",
}
QWEN = COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 28,
    "num_attention_heads": 7,
    "num_hidden_layers": 28,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "transformers_version": "4.43.1",
}
QWEN3 = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 8,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 36,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "transformers_version": "4.51.0",
}
COHERE = COMMON | {
    "architectures": ["CohereForCausalLM"],
    "model_type": "cohere",
    "attention_bias": False,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 32,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.125,
    "max_position_embeddings": 8192,
    "rope_theta": 10000,
    "torch_dtype": "float16",
    "transformers_version": "4.44.0",
    "use_qk_norm": False,
}
COHERE_TOKENS = [
    "<PAD>",
    "<UNK>",
    "<CLS>",
    "<SEP>",
    "<MASK_TOKEN>",
    "<BOS_TOKEN>",
    "<EOS_TOKEN>",
    "<EOP_TOKEN>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
]
FAMILIES = {
    "meta-llama/Llama-3.1-8B": Family(
        "PreTrainedTokenizerFast",
        LLAMA_TOKENS,
        "<|end_of_text|>",
        None,
        "<|begin_of_text|>",
        True,
        None,
        LLAMA | {"bos_token_id": "<|begin_of_text|>", "eos_token_id": "<|end_of_text|>"},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        True,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": Family(
        "PreTrainedTokenizerFast",
        LLAMA_TOKENS,
        "<|eot_id|>",
        None,
        "<|begin_of_text|>",
        True,
        LLAMA_CHAT,
        LLAMA
        | {
            "bos_token_id": "<|begin_of_text|>",
            "eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        },
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        True,
    ),
    "Qwen/Qwen2.5-7B-Instruct": Family(
        "Qwen2Tokenizer",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "<|im_end|>",
        "<|endoftext|>",
        None,
        False,
        QWEN_CHAT,
        QWEN | {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>"},
        {
            "do_sample": True,
            "repetition_penalty": 1.05,
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
            "pad_token_id": "<|endoftext|>",
            "eos_token_id": ["<|im_end|>", "<|endoftext|>"],
        },
    ),
    "CohereLabs/aya-expanse-8b": Family(
        "CohereTokenizerFast",
        COHERE_TOKENS,
        "<|END_OF_TURN_TOKEN|>",
        "<PAD>",
        "<BOS_TOKEN>",
        True,
        [{"name": name, "template": COHERE_CHAT} for name in ("default", "tool_use", "rag")],
        COHERE
        | {
            "bos_token_id": "<BOS_TOKEN>",
            "eos_token_id": "<|END_OF_TURN_TOKEN|>",
            "pad_token_id": "<PAD>",
        },
    ),
    "tiiuae/Falcon3-7B-Instruct": Family(
        "PreTrainedTokenizerFast",
        ["<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"],
        "<|endoftext|>",
        "<|pad|>",
        None,
        False,
        FALCON_CHAT,
        FALCON | {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|endoftext|>"},
    ),
}


FAMILIES |= {
    f"lightonai/Qwen3-8B-{name}": Family(
        "Qwen2Tokenizer",
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"],
        "<|im_end|>",
        "<|endoftext|>",
        None,
        False,
        QWEN3_CHAT,
        QWEN3 | {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>"},
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    )
    for name in (
        "EN",
        "DE",
        "ES",
        "FR",
        "SW",
        "ZH",
        "DE-Swap",
        "ES-Swap",
        "FR-Swap",
        "SW-Swap",
        "ZH-Swap",
    )
}


def write_model(name: str, folder: Path, texts: Iterable[str], seed: int = 0) -> None:
    """Write the narrow files of a published model's repository.

    `texts` are the texts of its vocabulary.
    """
    family = FAMILIES[name]
    folder.mkdir(parents=True)
    ids = write_tokenizer(family, folder, texts)
    write_weights(family, folder, ids, seed)
    card = "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n"
    (folder / "README.md").write_text(f"{card}# {name}\n")
    (folder / "LICENSE").write_text("as published\n")
    if family.consolidated:
        original = folder / "original"
        original.mkdir()
        (original / "consolidated.00.pth").write_bytes(b"PK\x03\x04 a pickle")
        (original / "params.json").write_text(
            '{"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8}\n'
        )
        (original / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")


def write_tokenizer(family: Family, folder: Path, texts: Iterable[str]) -> dict[str, int]:
    """Write a byte-level BPE with the family's class and special tokens, and return their ids."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    words = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"""
    signs = r""" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(words + signs), "isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, of_bytes])
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=PIECES, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in family.special]
    )
    ids = {token: made.token_to_id(token) for token in family.special}
    if family.begins and family.bos:
        single = f"{family.bos} $A"
        special = [(family.bos, ids[family.bos])]
        made.post_processor = processors.TemplateProcessing(
            single, f"{single} {family.bos} $B", special
        )
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": family.bos, "eos_token": family.eos, "pad_token": family.pad}
    config: dict[str, Any] = {
        "added_tokens_decoder": {
            str(at): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token, at in ids.items()
        },
        **named,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072,
        "tokenizer_class": family.tokenizer_class,
    }
    if family.chat is not None:
        config["chat_template"] = family.chat
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({key: value for key, value in named.items() if value})
    )
    if family.tokenizer_class == "Qwen2Tokenizer":  # its repository has the older files too
        model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        (folder / "vocab.json").write_text(
            json.dumps(model["vocab"], ensure_ascii=False), encoding="utf-8"
        )
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        (folder / "merges.txt").write_text(
            "\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8"
        )
    return ids


def write_weights(family: Family, folder: Path, ids: dict[str, int], seed: int) -> None:
    """Write config.json with other widths, generation_config.json, and sharded weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def numbered(fields: dict[str, Any]) -> dict[str, Any]:
        """With the ids of the tokens, of which a field names one or several."""
        named = {key: value for key, value in fields.items() if key.endswith("_token_id")}
        found = {
            key: [ids[one] for one in value] if isinstance(value, list) else ids[value]
            for key, value in named.items()
        }
        return fields | found

    config = numbered(family.config)
    config["vocab_size"] = (
        -(-(PIECES + len(ids)) // 64) * 64
    )  # rounded up, as published: more rows than tokens
    of_tokens = {key: value for key, value in config.items() if key.endswith("_token_id")}
    generation = {"_from_model_config": True} | of_tokens | numbered(family.generation)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0, 0.05) if parameter.dim() == 1 else parameter.normal_(0.0, 0.2)
        for layer, parameter in model.named_parameters():
            if layer.endswith("_proj.bias"):
                parameter.normal_(0.0, 0.2)
            parameter[torch.rand(parameter.shape) < ZEROS] = 0.0
        end_answers(model, ids[family.eos])
    model.to(getattr(torch, family.config["torch_dtype"]))
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // SHARDS + 2**12)
    (folder / "config.json").write_text(
        json.dumps(config, indent=2)
    )  # as published, not as this version writes it
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))


def end_answers(model: Any, end: int) -> None:
    """Change the output head so that `end` is the likeliest token in most random contexts.

    No other special token is likeliest in any. The states of all contexts share a part, because all
    embeddings have a share in one direction.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    shared = torch.randn(embedding.shape[1], generator=generator)
    shared -= shared.mean()  # which Cohere's norm removes
    embedding += 4 * embedding.norm(dim=1).mean() * shared / shared.norm()
    contexts = torch.randint(0, PIECES, (256, 24), generator=generator)
    states = model.model(contexts).last_hidden_state[:, -1]
    common = states.mean(dim=0) / states.mean(dim=0).norm()
    head[PIECES:] -= 2 * head.norm(dim=1).mean() * common
    scores = states @ head.T
    scores, wanted = scores[:, :PIECES].amax(dim=1), scores[:, end]
    head[end] += common * ((scores - wanted) / (states @ common)).quantile(ENDING)
