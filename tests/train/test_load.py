"""What a base is refused for when it is loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config.training import Model
from pipeline.errors import PipelineError
from pipeline.train.load import load_model, make_bpe


def test_a_bpe_is_trained_on_what_is_trained_on() -> None:
    """Not on the sides of the rows of a joint set; on all turns of a conversation."""
    texts = ["Mia has 3 apples.", "3 + 4 is 7."]
    turns = [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
    rows: list[dict[str, Any]] = [{"prompt": texts[0], "completion": texts[1]} for _ in range(20)]
    plain = make_bpe(rows, 300).get_vocab()
    assert make_bpe([row | {"side": "language"} for row in rows], 300).get_vocab() == plain
    assert make_bpe([row | {"messages": turns} for row in rows], 300).get_vocab() == plain
    assert make_bpe([{"text": text} for text in texts * 20], 300).get_vocab() == plain


def test_gemma_2_has_no_attention_of_torchs_own(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model("gemma2", **sizes, num_hidden_layers=1, vocab_size=32, head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def loaded(**words: Any) -> Any:
        asked = SimpleNamespace(
            model=Model(name="x", path=str(tmp_path), **words), sft=SimpleNamespace(weights="float32")
        )
        return load_model(SimpleNamespace(config=asked), None, tmp_path)  # type: ignore[arg-type]

    with pytest.raises(PipelineError, match=r"model.attn_implementation=sdpa: .* model.attn_implementation=eager$"):
        loaded()
    assert loaded(attn_implementation="eager").config.model_type == "gemma2"
