"""SmolLM2 trained on real GSM8K in each way.

What moves, on which tokens, and with the bits of a bare SFTTrainer.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from fixture_types import Call
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.train import stage

pytestmark = [pytest.mark.real_models, pytest.mark.real_data]

RECIPE = (
    "sft.precision=fp32 sft.learning_rate=1e-5 sft.batch_size=2 sft.micro_batch_size=1"
    " sft.seq_length=256 "
)
RECIPE += "sft.steps=2 sft.template=chat data.size=4 data.decontaminate=count"
BARE = Path(__file__).with_name("bare_sft.py")
JOINT = {  # a math and a language set, the latter from MGSM's exemplars in Swahili
    "exemplars_sw": (
        """
defaults: [{/data@sources.exemplars: own}, _self_]
name: exemplars_sw
side: language
sources:
  exemplars: {file: mgsm/sw/train.jsonl, prompt: "{question}", completion: "{answer}", language: sw}
"""
    ),
    "gsm8k_exemplars_sw": (
        """
defaults: [{/expert@union.gsm8k: gsm8k}, {/expert@union.exemplars_sw: exemplars_sw}, _self_]
name: gsm8k_exemplars_sw
side: both
"""
    ),
}
WAYS = {
    "full": "expert=gsm8k sft=full",
    "lora": "expert=gsm8k sft=lora",
    "partial": "expert=gsm8k sft=partial partition=A sft.steps=1 data.size=2",
    "simultaneous": (
        "expert=gsm8k_exemplars_sw sft=simultaneous partition=B data.size=2"
        " data.word_problems=count"
    ),
}
LAYERS = 30
MLP, ATTENTION = ("mlp", "post_attention_layernorm"), ("self_attn", "input_layernorm")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with the joint expert's configuration and runs, deleted at the end."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "conf/expert").mkdir(parents=True)
    for name, text in JOINT.items():
        (folder / f"conf/expert/{name}.yaml").write_text(text)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def data_root(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the shortest rows of real GSM8K and of MGSM's exemplars.

    A median row has three times as many tokens.
    """
    root = tmp_path_factory.mktemp("data")
    for folder in ("gsm8k", "mgsm/sw"):
        (root / folder).mkdir(parents=True)
    for name, count in (("gsm8k/train.jsonl", 8), ("mgsm/sw/train.jsonl", 3)):
        rows = sorted((data / name).read_text(encoding="utf-8").splitlines(), key=len)[:count]
        (root / name).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return root


@pytest.fixture
def trained(
    here: Path, smollm2: Path, data_root: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], SimpleNamespace]:
    """Train by stage=sft; return its log, weights, file of rows, and trainer."""
    trainers: list[Any] = []
    make = stage.trainer_of

    def remembering(*args: Any, **keywords: Any) -> Any:
        made = make(*args, **keywords)
        trainers.append(made[0])
        return made

    monkeypatch.setattr(stage, "trainer_of", remembering)

    def train(way: str) -> SimpleNamespace:
        shared = [
            f"model={smollm2}",
            f"data_root={data_root}",
            f"runs_dir={here}/runs",
            "tracking.mode=disabled",
        ]
        words = {word.split("=")[0]: word for word in [*RECIPE.split(), *WAYS[way].split()]}
        told = call(
            f"--config-dir={here}/conf", "stage=sft", "recipe=default", *shared, *words.values()
        )
        assert told.status == 0, told.err
        folder = Path(told.out.strip())
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        (weights,) = (load_file(file) for file in folder.glob("*.safetensors"))
        rows = json.loads((folder / "manifest.json").read_text())["parents"]["data"]["name"]
        file = here / "runs" / rows / "train.jsonl"
        return SimpleNamespace(log=log, weights=weights, rows=file, trainer=trainers.pop())

    return train


def layers_of(names: set[str], inside: tuple[str, ...]) -> set[int]:
    """Return the layers with a parameter of these modules among `names`."""
    found = (re.match(r"model\.layers\.(\d+)\.(\w+)\.", name) for name in names)
    return {int(match[1]) for match in found if match and match[2] in inside}


def moved(weights: dict[str, torch.Tensor], base: Path) -> set[str]:
    start = load_file(base / "model.safetensors")
    assert weights.keys() == start.keys()
    return {
        name for name, tensor in weights.items() if not torch.equal(tensor, start[name].float())
    }


def conversation(row: dict[str, str]) -> tuple[str, str]:
    """Write a row as SmolLM2's template does: the part before the answer, and the answer."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    before = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{row['prompt']}<|im_end|>\n"
    )
    return f"{before}<|im_start|>assistant\n", f"{row['completion']}<|im_end|>\n"


def rows_of(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_full_training_equals_a_bare_sfttrainer(
    trained: Callable[[str], SimpleNamespace], smollm2: Path, here: Path
) -> None:
    """Losses, gradient norms and all weights to the bit.

    The trained labels are the answer and its end of turn.
    """
    full = trained("full")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = [conversation(row) for row in rows_of(full.rows)]
    (taught,) = full.trainer.sets.values()
    for row, (before, answer) in zip(taught, texts, strict=True):
        assert tokenizer.decode(row["input_ids"]) == before + answer
        labels = [label for label in row["labels"] if label != -100]
        assert tokenizer.decode(labels) == answer and row["labels"][-len(labels) :] == labels
    del full.trainer
    done = forked.python(
        "-c", BARE.read_text(), *map(str, (smollm2, full.rows, here / "bare")), timeout=1200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    history = json.loads((here / "bare/history.json").read_text())[:2]
    for ours, bare in zip(full.log, history, strict=True):
        assert (ours["loss"], ours["grad_norm"]) == (bare["loss"], bare["grad_norm"])
    bare = load_file(here / "bare/model.safetensors")
    assert {
        name for name, tensor in full.weights.items() if not torch.equal(tensor, bare[name])
    } == set()
    assert moved(full.weights, smollm2) == set(bare)


def losses_of_base(base: Path, *sets: list[dict[str, str]]) -> list[float]:
    """Return the mean negative log-probability of the answers in each set, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    losses = []
    for rows in sets:
        total, count = 0.0, 0
        for before, answer in map(conversation, rows):
            start, ids = len(tokenizer(before).input_ids), tokenizer(before + answer).input_ids
            with torch.no_grad():
                log_probabilities = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            total -= sum(float(log_probabilities[at - 1, ids[at]]) for at in range(start, len(ids)))
            count += len(ids) - start
        losses.append(total / count)
    return losses


def first_rows(file: Path) -> list[dict[str, str]]:
    """Return the rows of the first step: the first two, shuffled by the seed."""
    rows = rows_of(file)
    return [
        rows[i]
        for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()[:2]
    ]


def test_lora_trains_adapters_of_all_projections(
    trained: Callable[[str], SimpleNamespace], smollm2: Path
) -> None:
    """The first loss is the base's.

    After two steps the second factor of every adapter has left zero.
    """
    lora = trained("lora")
    assert [lora.log[0]["loss"]] == pytest.approx(
        losses_of_base(smollm2, first_rows(lora.rows)), rel=1e-5
    )
    factors = {name for name in lora.weights if ".lora_B." in name}
    assert len(factors) == LAYERS * 7 and len(lora.weights) == 2 * len(factors)
    assert all(lora.weights[name].abs().max() > 0 for name in factors)


def test_partial_training_moves_its_side_of_the_partition(
    trained: Callable[[str], SimpleNamespace], smollm2: Path
) -> None:
    """Math's side of partition A (unreasonable, section 3.3).

    The MLPs of all layers but the first six and last two.
    """
    partial = trained("partial")
    names = moved(partial.weights, smollm2)
    assert (
        layers_of(names, MLP) == set(range(6, LAYERS - 2)) and layers_of(names, ATTENTION) == set()
    )
    assert len(names) == 4 * (
        LAYERS - 8
    )  # three projections and their norm; nothing outside the layers


def test_simultaneous_training_moves_each_side_on_its_own_rows(
    trained: Callable[[str], SimpleNamespace], smollm2: Path
) -> None:
    """Partition B: a step on two math rows, then one on two Swahili rows.

    All layers move, and nothing outside.
    """
    both = trained("simultaneous")
    rows = rows_of(both.rows)
    math = [row for row in rows if row["side"] == "math"]
    language = [row for row in rows if row["side"] == "language"]
    assert len(math) == len(language) == 2
    losses = losses_of_base(smollm2, math, language)
    assert both.log[0]["loss"] == pytest.approx(losses[0], rel=1e-5)
    assert [row["side"] for row in both.log] == ["math", "language"]
    # the step on math has moved the other layers, a little
    assert both.log[1]["loss"] == pytest.approx(losses[1], rel=0.05)
    names = moved(both.weights, smollm2)
    assert layers_of(names, MLP) == layers_of(names, ATTENTION) == set(range(LAYERS))
    assert len(names) == 9 * LAYERS  # seven projections and two norms
