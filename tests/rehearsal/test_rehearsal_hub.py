"""The rehearsal's Hub has the tables' inputs, and its narrow models the true architectures."""

from pathlib import Path

import pytest
import torch
from narrow_models import ENDING, FAMILIES, PIECES, write_model
from published import BITEXTS, REVISIONS, TAGS, Texts, benchmark_sets, training_sets

from pipeline.config.compose import compose
from pipeline.estimate.models import by_hub
from pipeline.hub.addresses import plain_addresses
from pipeline.models.shape import SHAPES
from pipeline.runs.graph import order_runs
from pipeline.stages.hub_inputs import collect_hub_inputs
from pipeline.tables.planned_runs import Planning


def test_whatever_a_table_reads_is_there(tmp_path: Path) -> None:
    """Also what is only read once a model is selected. The other tables start from these."""
    runs = []
    tables = (
        "layer_swapping_claims unreasonable_table3 unreasonable_table_a2 native_reasoning"
        " merging_pool adaptive_swap"
    )
    for table in tables.split():
        planning = Planning.of(
            compose(["stage=prefetch", f"table={table}", f"runs_dir={tmp_path}"])
        )
        runs += planning.targets()
        runs += [
            run
            for score in planning.waiting_scores()
            if (run := planning.representative_evaluation(score))
        ]
    inputs = collect_hub_inputs(order_runs(runs))
    data_sets = {
        *training_sets(),
        *benchmark_sets(),
        "CohereForAI/Global-MMLU",
    }  # by its former name, too
    assert set(inputs.models) <= set(FAMILIES)
    for source in inputs.sources.values():
        if source.url:
            assert any(plain_addresses(source.url).endswith(path) for path in BITEXTS)
        else:
            assert source.hub in data_sets
            assert source.revision in (None, REVISIONS.get(source.hub), TAGS.get(source.hub))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_narrow_model_is_the_published_one_in_all_but_its_width(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shape = SHAPES[by_hub(name)]
    texts = Texts()
    write_model(
        name, tmp_path / "model", [texts.text(code) for code in ("en", "sw", "bn", "te", "ja")] * 20
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    config = model.config
    assert config.num_hidden_layers == shape.layers and config.hidden_size <= 64
    assert config.num_attention_heads * shape.kv_heads == config.num_key_value_heads * shape.heads
    parts = {part.removesuffix(".weight") for part in model.state_dict() if ".layers.0." in part}
    assert len([part for part in parts if part.endswith("norm")]) == shape.norms + 2 * shape.qk_norm
    assert any(part.endswith("q_proj.bias") for part in parts) == shape.qkv_bias
    assert config.tie_word_embeddings == shape.tied
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "Swali: জল 12? 水\n"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    if FAMILIES[name].chat:
        turns = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "8"}]
        assert FAMILIES[name].eos in tokenizer.apply_chat_template(turns, tokenize=False)
    contexts = torch.randint(0, PIECES, (200, 24), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        following = model(contexts).logits[:, -1].argmax(dim=-1)
    ended = (following == tokenizer.eos_token_id).float().mean().item()
    assert ended > ENDING - 0.25
