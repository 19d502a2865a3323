"""stage=export of a checkpoint.

What plain transformers loads, what the card says, what never goes along, refusals.
"""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from as_torch import as_torch
from fixture_types import Call, Make, Patch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.commands import export_model as module
from pipeline.models.checkpoint import Checkpoint, digest_tensors
from pipeline.runs.manifest import read_manifest

NEVER = ("manifest.json", "log.jsonl", "wandb", "snapshots", "trainer")


def logits(folder: Path, text: str = "2 + 3 = ?") -> torch.Tensor:
    """Plain transformers, as a stranger loads it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits


@pytest.fixture
def export(call: Call, runs_dir: Path, tmp_path: Path) -> Call:
    def command(checkpoint: Any, *more: str, to: Any = None, **how: Any) -> SimpleNamespace:
        words = [
            f"checkpoint={checkpoint}",
            f"export.to={to or tmp_path / 'out'}",
            f"runs_dir={runs_dir}",
            *more,
        ]
        return call("stage=export", *words, **how)

    return command


def nothing_of_here(folder: Path, runs_dir: Path) -> None:
    """No file that is ours alone, and no path of this machine in any of the others."""
    for path in folder.rglob("*"):
        assert path.name not in NEVER, path
        if path.suffix != ".safetensors":
            text = path.read_text(encoding="utf-8")
            for place in (str(runs_dir), str(folder.parent), str(Path.home()), os.getcwd()):
                assert place not in text, (path, place)


# --- what is written ---


def test_a_merge_to_take_away(export: Call, swap: Path, runs_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(swap, status=0).out.strip() == str(out)
    assert torch.equal(logits(out), logits(swap))
    assert digest_tensors(out) == digest_tensors(swap)
    nothing_of_here(out, runs_dir)
    assert {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    } <= {path.name for path in out.iterdir()}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]

    card = ModelCard.load(out / "README.md")
    assert {"merge", "layer_swap"} <= set(
        card.data.tags
    ) and card.data.library_name == "transformers"
    assert all(parent.name in card.text for parent in read_manifest(swap).parents.values())  # type: ignore[union-attr]


def test_a_cast_says_what_it_costs(export: Call, math_expert: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = export(math_expert, "export.dtype=bfloat16", status=0)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    errors, sizes = 0.0, 0.0
    was, now = Checkpoint.open(math_expert), Checkpoint.open(out)
    for name in was.names:
        exact = as_torch(was, name).double()
        assert torch.equal(as_torch(now, name), as_torch(was, name).to(torch.bfloat16)), name
        error = as_torch(now, name).double() - exact
        errors, sizes = errors + float((error**2).sum()), sizes + float((exact**2).sum())
    expected = f"cast from F32 to BF16: relative error {(errors / sizes) ** 0.5:.2g}"
    for text in (told.err, (out / "README.md").read_text()):
        assert expected in text, text


def test_added_adapter(
    export: Call, make_run: Make, world: Path, base: Path, tmp_path: Path, runs_dir: Path
) -> None:
    from peft import PeftModel
    from tiny_words import FEW

    start = ["model=trained", f"model.path={base}", f"data_root={world}", "sft.learning_rate=1e-2"]
    lora = make_run("stage=sft", *start, "expert=math", "sft=lora", "recipe=sandbox_math", *FEW)
    export(lora, status=0)
    out, text = tmp_path / "out", "2 + 3 = ?"
    assert not (out / "adapter_config.json").exists()
    nothing_of_here(out, runs_dir)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), lora).eval()
    with torch.no_grad():
        expected = adapted(**AutoTokenizer.from_pretrained(base)(text, return_tensors="pt")).logits
    torch.testing.assert_close(logits(out, text), expected, rtol=1e-4, atol=1e-5)
    assert (logits(base, text) - expected).abs().max() > 1e-3  # of the base alone they are others


def complete(source: Path, target: Path) -> Path:
    """Write a random model with a loadable tokenizer, and with libraries' local paths."""
    shutil.copytree(source, target)
    words = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    (target / "tokenizer.json").write_text(json.dumps(words))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "name_or_path": str(target),
        "unk_token": "a",
    }
    settings["special_tokens_map_file"] = "/home/ada/map.json"
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((target / "config.json").read_text()) | {"_name_or_path": str(target)}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_paths_of_libraries_stay(
    export: Call, models: dict[str, list[Path]], tmp_path: Path, runs_dir: Path
) -> None:
    assert (
        "licence is unknown" in export(complete(models["qwen2"][1], tmp_path / "ada"), status=0).err
    )
    out = tmp_path / "out"
    nothing_of_here(out, runs_dir)
    assert "ada" not in "".join(path.read_text() for path in out.glob("*.json"))
    assert json.loads((out / "tokenizer_config.json").read_text())["unk_token"] == "a"


def test_a_tokenizer_of_vocab_txt(
    export: Call, models: dict[str, list[Path]], tmp_path: Path, runs_dir: Path
) -> None:
    """An older BERT vocabulary: scoring takes such a folder, and so does an export."""
    source = complete(models["qwen2"][1], tmp_path / "ada")
    (source / "tokenizer.json").unlink()
    assert "has no tokenizer. Copy the tokenizer of its base into" in export(source, status=1).err
    (source / "vocab.txt").write_text("[UNK]\na\n")
    assert (
        export(source).status == 0 and (tmp_path / "out" / "vocab.txt").read_text() == "[UNK]\na\n"
    )


# --- the cards of runs ---


def test_experts_of_the_hub_have_ids(
    models: dict[str, list[Path]], monkeypatch: Patch, make_run: Make, call: Call, tmp_path: Path
) -> None:
    """org/math and org/language on the Hub."""
    folders = {}
    for role, folder in zip(("math", "language"), models["llama"][1:], strict=True):
        folders[f"org/{role}"] = complete(folder, tmp_path / "hub" / role)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(folders[name]))
    words = [
        "merge=soup",
        "merge.experts=[hub:org/math,hub:org/language]",
        f"runs_dir={tmp_path}/runs",
    ]
    merged = make_run("stage=merge", *words)
    asked = [
        "stage=export",
        f"checkpoint={merged}",
        f"export.to={tmp_path}/out",
        f"runs_dir={tmp_path}/runs",
    ]
    call(*asked, "export.licence=apache-2.0", status=0)
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.license == "apache-2.0" and card.data.base_model == [
        "org/math",
        "org/language",
    ]
    assert card.data.to_dict()["base_model_relation"] == "merge"


def test_a_snapshot_and_a_selection_too(
    export: Call, make_run: Make, world: Path, base: Path, tmp_path: Path
) -> None:
    from tiny_words import FEW

    start = [
        "model=trained",
        f"model.path={base}",
        f"data_root={world}",
        "expert=math",
        "recipe=sandbox_math",
    ]
    training = make_run(
        "stage=sft",
        *start,
        *FEW,
        "sft.snapshot_every=4",
        "data.validation=4",
        "sft.learning_rate=1e-3",
    )
    chosen = make_run("stage=select", "select=unreasonable", f"checkpoints=[{training.name}]")
    for checkpoint, weights in (
        (f"{training.name}@1", training / "snapshots/step-1"),
        (chosen.name, chosen),
    ):
        export(checkpoint, to=tmp_path / checkpoint, status=0)
        assert digest_tensors(tmp_path / checkpoint) == digest_tensors(weights)
        assert "`expert=math sft=full`" in (tmp_path / checkpoint / "README.md").read_text()
    assert digest_tensors(training / "snapshots/step-1") != digest_tensors(training)


# --- refusals ---


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        ("full", "holds files. Name a new or empty folder"),
        ("file", "exists and is not a folder. Give the folder another name"),
        ("nowhere", "cannot hold a folder. Name a folder in an existing folder"),
        ("run", "is inside the run"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    made: str, sentence: str, export: Call, swap: Path, tmp_path: Path
) -> None:
    place = {"nowhere": tmp_path / "a/b", "run": swap / "out"}.get(made, tmp_path / "out")
    if made == "full":
        place.mkdir()
        (place / "mine.txt").write_text("mine")
    if made == "file":
        place.write_text("mine")
    told = export(swap, to=place)
    assert told.status == 1 and told.out == "" and sentence in told.err
    assert len([line for line in told.err.splitlines() if line]) == 1
    assert (
        made not in ("full", "file")
        or "mine" in (place / "mine.txt" if made == "full" else place).read_text()
    )


def test_the_hub_is_left_to_its_own_command(call: Call, tmp_path: Path) -> None:
    told = call("stage=export", "checkpoint=x", "export.to=hub:me/name", f"runs_dir={tmp_path}")
    assert told.status == 1 and told.out == "" and list(tmp_path.iterdir()) == []
    assert "Set export.to=./FOLDER, then run hf upload me/name ./FOLDER." in told.err


def test_a_run_that_was_changed_is_not_exported(
    export: Call, swap: Path, runs_dir: Path, tmp_path: Path
) -> None:
    copy = tmp_path / swap.name
    shutil.copytree(swap, copy)
    (copy / "tokenizer_config.json").write_text("{}")
    assert (
        "was changed after it was finished" in export(copy, status=1).err
        and not (tmp_path / "out").exists()
    )


def test_nothing_half_written_looks_finished(
    export: Call, swap: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    seen: list[set[str]] = []

    def full(*_: Any) -> str:
        seen.append({path.name for path in tmp_path.iterdir()})
        raise OSError(28, "No space left on device", "README.md")

    monkeypatch.setattr(module, "card_text", full)
    assert "No space left" in export(swap, status=1).err
    assert seen and "out" not in seen[0] and list(tmp_path.iterdir()) == []
