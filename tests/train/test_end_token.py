"""sft.eos_token: the end of a response if chat template and tokenizer disagree."""

import json
import shutil
from pathlib import Path

import pytest
from fixture_types import Call, Patch
from tiny_words import FEW

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def words(base: Path, tmp_path: Path, monkeypatch: Patch) -> list[str]:
    """Return a training with a ChatML template of a base with another end of sequence."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(base),
        AutoModelForCausalLM.from_pretrained(base),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained("base")
    tokenizer.save_pretrained("base")
    rows = [{"q": f"{n} + 1?", "a": f"It is {n + 1}."} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = "expert.sources.own={url: ./rows.jsonl, prompt: '{q}', completion: '{a}'}"
    quiet = ["runs_dir=runs", "tracking.mode=disabled", "data.benchmarks=none", "sft.template=chat"]
    return ["stage=sft", "expert=own", "model=trained", "model.path=./base", own, *FEW, *quiet]


def test_the_end_of_a_response_is_named_trained_on_and_saved(words: list[str], call: Call) -> None:
    from transformers import AutoTokenizer

    refused = call(*words, status=1).err
    assert (
        "does not end a response with </s> alone" in refused
        and "or use sft.eos_token='<|im_end|>'" in refused
    )
    folder = Path(call(*words, "sft.eos_token='<|im_end|>'", status=0).out.strip())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    saved = [
        json.loads((folder / f"{name}.json").read_text())
        for name in ("config", "generation_config")
    ]
    assert [settings["eos_token_id"] for settings in saved] == [
        end,
        end,
    ] and tokenizer.eos_token_id == end
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert all(end in row["labels"] for row in rows)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["config"]["sft"]["eos_token"] == "<|im_end|>"  # not masked as a credential


def test_a_token_that_the_tokenizer_lacks_is_refused(words: list[str], call: Call) -> None:
    shutil.rmtree("runs", ignore_errors=True)
    refused = call(*words, "sft.eos_token='<|end|>'", status=1)
    assert "sft.eos_token=<|end|>: the tokenizer of base has no such token" in refused.err
