"""Small made-up benchmarks, and the real data where a person has it."""

from pathlib import Path

import pytest
from made_up import REAL_DATA, byte_tokenizer, fact, passage, sentence, worked, write_rows


@pytest.fixture
def data_root(tmp_path: Path) -> Path:
    """Write every benchmark in en and qac.

    It has 10 MGSM problems (answer 10 + i), 9 passages, 2 subjects of facts, and 6 sentences.
    """
    root = tmp_path / "data"
    for code in ("en", "qac"):
        shots = [
            worked(f"Question: {i}?", f"Step-by-Step Answer: So. The answer is {i}.", i)
            for i in range(1, 9)
        ]
        write_rows(root / "mgsm" / code / "train.jsonl", shots)
        for split, count in (("test", 10), ("dev", 4)):
            problems = [
                worked(f"{split} problem {i} in {code}", None, 10 + i) for i in range(count)
            ]
            write_rows(root / "mgsm" / code / f"{split}.jsonl", problems)
        write_rows(
            root / "belebele" / code / "test.jsonl", [passage(i, str(i % 4 + 1)) for i in range(9)]
        )
        dev = [fact(i, ("colors", "homes")[i % 2], "ABCD"[i % 4]) for i in range(6)]
        write_rows(root / "global_mmlu" / code / "dev.jsonl", dev)
        test = [fact(100 + i, "homes" if i < 3 else "colors", "ABCD"[i % 4]) for i in range(8)]
        write_rows(root / "global_mmlu" / code / "test.jsonl", test)
        for split in ("dev", "devtest"):
            lines = [
                sentence(i, f"{code} {split} says the word number {i} here.") for i in range(6)
            ]
            write_rows(
                root / "flores" / code / f"{split}.jsonl", lines[::-1] if code == "qac" else lines
            )
    return root


@pytest.fixture
def real_data() -> Path:
    assert REAL_DATA, "mark the test with needs_real_data"
    return Path(REAL_DATA)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Return a checkpoint with random weights that favour digits.

    It is a Llama of 2 layers and width 32, with a token per byte and 8192 positions.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, (words, tokenizer) = tmp_path / "tiny", byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.5,  # at the usual 0.02 every prompt gets the same answer
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        with torch.no_grad():  # digits are likelier than the rest, so that answers hold numbers
            for word in "0123456789":
                model.lm_head.weight[words.index(word)] *= 4
        model.save_pretrained(folder)
    return folder
