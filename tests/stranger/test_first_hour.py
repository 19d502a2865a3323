"""The first hour of somebody with a model, data, a language and a table of their own: the files of
docs/getting_started.md, a Llama by plain transformers, and real MGSM and GSM8K where PIPELINE_TEST_DATA has them."""

from __future__ import annotations

import csv
import json
import os
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixture_types import Call
from reader import ROOT, write_files

CONF = "--config-dir=conf_of_mine"
TRAIN = ["model=./my-llama", "data_root=.", "sft.batch_size=4", "sft.seq_length=256", "sft.learning_rate=1e-3"]
TRAIN += ["sft.epochs=1", "tracking.mode=disabled"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder with the files of the page, and `my-llama` beside them."""
    folder = tmp_path_factory.mktemp("stranger")
    write_files(ROOT / "docs/getting_started.md", folder)
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    runpy.run_path("make_model.py")
    yield folder
    patch.undo()


@pytest.fixture
def experts(here: Path, call: Call) -> tuple[str, str]:
    """The math and the Swahili expert: made by the first test that asks, found by the others."""
    told = [call(CONF, "stage=sft", f"expert={name}", *TRAIN) for name in ("mymath", "swahili")]
    assert [one.status for one in told] == [0, 0], told
    return told[0].out.strip(), told[1].out.strip()


@pytest.fixture
def swap(experts: tuple[str, str], call: Call) -> str:
    math, language = experts
    told = call(
        "stage=merge", "merge=layer_swap", f"merge.math={math}", f"merge.language={language}", "merge.bottom_layers=2",
        "merge.top_layers=1",
    )  # fmt: skip
    assert told.status == 0, told.err
    return str(told.out.strip())


def scores_in(text: str) -> list[list[str]]:
    """The lines of the small table that an evaluation ends with, the head first."""
    lines = text[text.index("scores:\n") :].splitlines()[1:]
    return [line.split() for line in lines if line.startswith("  ")]


def test_scores_are_printed_found_again_and_in_status(swap: str, call: Call) -> None:
    words = [CONF, "stage=eval", f"checkpoint={swap}", "eval=belebele_0shot", "languages=[kpz]", "data_root=."]
    words += ["tracking.mode=disabled"]
    first, again = call(*words), call(*words)
    assert first.status == again.status == 0 and first.out == again.out, first.err + again.err
    assert "was finished before" in again.err and "was finished before" not in first.err
    (row,) = json.loads((Path(first.out.strip()) / "scores.json").read_text())["rows"][:1]
    for told in (first, again):
        head, line = scores_in(told.err)[:2]
        assert head == ["task", "language", "metric", "score", "n"]
        assert line[:4] == ["belebele", "0-shot", "kpz", "acc"] and line[4] == f"{100 * row['value']:.1f}"
    assert f"belebele kpz {100 * row['value']:.1f}" in call("stage=status").out
    shown = call("stage=show", f"run={first.out.strip()}", "show.samples=1").out
    assert "languages=" in shown and "answers of belebele.kpz:" in shown and Path(swap).name in shown


def test_own_rows_are_what_trains(experts: tuple[str, str], here: Path) -> None:
    _, language = experts
    data = json.loads((here / language / "manifest.json").read_text())["parents"]["data"]["name"]
    found = {
        (row["prompt"], row["completion"])
        for row in map(json.loads, (here / "runs" / data / "train.jsonl").read_text(encoding="utf-8").splitlines())
    }
    with (here / "mine.csv").open(encoding="utf-8") as file:
        assert found == {(f"Swali: {row['question']}", row["answer"]) for row in csv.DictReader(file)}


def test_the_swap_is_plain_transformers_and_is_the_two_experts(swap: str, experts: tuple[str, str], here: Path) -> None:
    """Layers 0, 1 and 7 are the language expert's bits, 2 to 6 the math expert's; the rest is their mean."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    merged, math, language = (AutoModelForCausalLM.from_pretrained(one).state_dict() for one in (swap, *experts))
    base = AutoModelForCausalLM.from_pretrained("my-llama").state_dict()
    for name, tensor in merged.items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        mean = (math[name] + language[name]) / 2
        wanted = mean if layer is None else language[name] if layer in (0, 1, 7) else math[name]
        assert torch.equal(tensor, wanted), name
    moved = [name for name in merged if not torch.equal(merged[name], base[name])]
    assert len(moved) > len(merged) / 2
    text = "Swali: Samaki huishi wapi?"
    assert AutoTokenizer.from_pretrained(swap)(text) == AutoTokenizer.from_pretrained("my-llama")(text)


def test_checkpoints_that_no_run_made(here: Path, call: Call) -> None:
    """A sweep over two folders of plain transformers with a base that is one too; its points are merges by hand."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained("my-llama")
    for seed, name in enumerate(("theirs-math", "theirs-language")):
        torch.manual_seed(seed)
        expert = AutoModelForCausalLM.from_pretrained("my-llama")
        for parameter in expert.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
        expert.save_pretrained(here / name)
        AutoTokenizer.from_pretrained("my-llama").save_pretrained(here / name)
    experts = ["merge.experts=[./theirs-math,./theirs-language]", "merge.base=./my-llama"]
    told = call("stage=merge", "merge=task_arithmetic", *experts, "merge.scale=0.5")
    assert told.status == 0, told.err
    merged = AutoModelForCausalLM.from_pretrained(told.out.strip()).state_dict()
    math, language = (
        AutoModelForCausalLM.from_pretrained(f"theirs-{one}").state_dict() for one in ("math", "language")
    )
    weights = json.loads((Path(told.out.strip()) / "manifest.json").read_text())["decided_by"]["config"]["merge"]
    assert weights["scale"] == 0.5
    for name, start in base.state_dict().items():
        wanted = start + 0.5 * ((math[name] - start) + (language[name] - start))
        assert torch.allclose(merged[name], wanted, atol=1e-6), name
    grid = [*experts, "sweep.scale=[0.5,1.0]", "eval=belebele_0shot", "languages=[kpz]", "data_root=."]
    swept = call(CONF, "stage=sweep", "merge=task_arithmetic", *grid, "tracking.mode=disabled")
    assert swept.status == 0 and Path(swept.out.strip()).is_file(), swept.err
    analyzed = call("stage=analyze", "checkpoint=./theirs-math", "base=./my-llama", "analyze.threshold=1e-3")
    assert analyzed.status == 0 and (Path(analyzed.out.strip()) / "map.svg").is_file(), analyzed.err


def test_another_family_and_a_mixture_of_experts(here: Path, call: Call) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("my-llama")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "head_dim": 16}
    for kind, more in (("gemma2", {}), ("mixtral", {"num_local_experts": 2})):
        config = AutoConfig.for_model(kind, **sizes, **more, bos_token_id=0, eos_token_id=1, pad_token_id=1)
        AutoModelForCausalLM.from_config(config).save_pretrained(here / kind)
        tokenizer.save_pretrained(here / kind)
    words = [CONF, "stage=sft", "expert=swahili", *TRAIN[1:], "sft=partial", "partition=own"]
    words += ["partition.bottom_layers=1", "partition.top_layers=1"]
    refused = call(*words, "model=./gemma2")
    assert refused.status == 1 and refused.err.endswith("give model.attn_implementation=eager\n"), refused.err
    trained = call(*words, "model=./gemma2", "model.attn_implementation=eager")
    assert trained.status == 0, trained.err
    before = AutoModelForCausalLM.from_pretrained("gemma2").state_dict()
    after = AutoModelForCausalLM.from_pretrained(trained.out.strip()).state_dict()
    moved = {name.split(".")[2] for name in before if not before[name].equal(after[name].to(before[name].dtype))}
    assert moved == {"0", "3"}  # the language side, and nothing else
    refused = call(*words, "model=./mixtral")
    assert refused.status == 1 and "mixture of experts" in refused.err and "Traceback" not in refused.err


def test_a_study_from_the_page(experts: tuple[str, str], here: Path, call: Call) -> None:
    """Each score is the accuracy that lm_eval's rule gives from the stored answers."""
    told = call(CONF, "stage=table", "table=./mine.yaml", "launcher.workers=1", "tracking.mode=disabled",
                "every.sft.epochs=1")  # fmt: skip
    assert told.status == 0 and told.out.strip() == "runs/reports/mine/index.html", told.err
    assert told.err.count(" (sft), ") == 2  # of the study's own files
    with Path("runs/reports/mine/cells.csv").open(encoding="utf-8") as file:
        cells = list(csv.DictReader(file))
    assert [one["row"] for one in cells] == ["base", "math", "sw", "layer_swap", "soup"]
    for cell in cells:
        answers = (here / "runs" / cell["runs"] / "samples/belebele.kpz.jsonl").read_text().splitlines()
        right = [json.loads(line)["correct"] for line in answers]
        assert len(right) == 2 and float(cell["value"]) in (sum(right) / 2, 100 * sum(right) / 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["stage=eval", "checkpoint=./my-llama", "eval=mgsm_2shot", "languages=[kpz]"], "unknown language 'kpz'"),
        (["stage=sft", "expert=own", *TRAIN, "sft.seq_length=9000", "expert.sources.own.file=mine.csv",
          "expert.sources.own.prompt='{question}'", "expert.sources.own.completion='{answer}'"], "above the 8192"),
    ],
)  # fmt: skip
def test_what_is_typed_wrong(words: list[str], sentence: str, here: Path, call: Call) -> None:
    told = call(*words)
    assert told.status == 1 and sentence in told.err and told.err.count("\n") == 1, told.err


def test_too_many_layers_name_the_remedy(experts: tuple[str, str], call: Call) -> None:
    words = [f"merge.math={experts[0]}", f"merge.language={experts[1]}", "merge.bottom_layers=9"]
    told = call("stage=merge", "merge=layer_swap", *words)
    assert told.status == 1 and "set merge.scale_to_depth=true" in told.err


@pytest.mark.real_data
def test_real_mgsm_and_gsm8k(here: Path, call: Call) -> None:
    """A bare Llama trains on real GSM8K and is asked real Swahili problems, in the prompts of the file."""
    real = os.environ["PIPELINE_TEST_DATA"]
    words = [one for one in TRAIN if not one.startswith(("data_root", "sft.epochs", "sft.seq_length"))]
    trained = call(
        "stage=sft", "expert=gsm8k", f"data_root={real}", *words, "data.size=16", "sft.seq_length=512", "sft.steps=2"
    )
    assert trained.status == 0, trained.err
    asked = ["eval=mgsm_2shot", "eval.limit=2", "eval.max_gen_toks=4", "languages=[sw]", "tracking.mode=disabled"]
    told = call("stage=eval", f"checkpoint={trained.out.strip()}", f"data_root={real}", *asked)
    assert told.status == 0, told.err
    samples = (Path(told.out.strip()) / "samples/mgsm.sw.jsonl").read_text(encoding="utf-8").splitlines()
    problems = (Path(real) / "mgsm/sw/test.jsonl").read_text(encoding="utf-8").splitlines()
    for sample, problem in zip(map(json.loads, samples), map(json.loads, problems), strict=False):
        assert problem["question"] in sample["prompt"] and sample["prompt"].count("Swali:") == 3
    assert len(samples) == 2
