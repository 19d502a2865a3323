"""One tiny run a stage holds its values.

Where one moves, results have changed: raise the version in its stage's row.

Held is what the rounding of a processor cannot move. Trainings are short, in fp32 and without Muon:
the first loss and gradient norm are held to 1e-4, later losses to 1e-3, the length of each tensor's
displacement from its start to 2 %. Merges, evaluations and analyses are of fixed weights, the
shipped base and integers added to it: merged weights are held to the bit, log-likelihoods to 1e-4,
changes to 1e-6, answers and choices as they are, where the next best is far away. Data files are
held to the byte. New runs (a number was raised, or a test's words were changed) have their values
written down by

    PIPELINE_WRITE_VALUES=1 python -m pytest tests/test_versions.py

which leaves those of old runs alone: they do not change without a new number.
"""

import csv
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture_types import Make
from safetensors.torch import load_file
from tiny_words import FEW

from pipeline.runs.manifest import read_manifest

VALUES = Path(__file__).with_name("values.json")
BASE = Path(__file__).parents[1] / "src/pipeline/data/sandbox_base"
TOLERANCES = {
    "first loss": {"rel": 1e-4},
    "first gradient norm": {"rel": 1e-4},
    "later losses": {"rel": 1e-3},
    "displacements": {"rel": 2e-2},
    "validation losses": {"rel": 1e-3},
    "log-likelihoods": {"abs": 1e-4},
    "changes": {"rel": 1e-6},
}
NARROW = (
    1e-3  # logits and log-likelihoods nearer than this could change places on another processor
)


# --- what is held ---


def held(what: str, folder: Path, found: dict[str, Any]) -> None:
    """Check that the same run hash gives the same values, and write down those of a new hash.

    A hash may be new because a parent has another version.
    """
    manifest = read_manifest(folder)
    assert manifest is not None
    kept = json.loads(VALUES.read_text()) if VALUES.is_file() else {}
    if os.environ.get("PIPELINE_WRITE_VALUES") and kept.get(what, {}).get("run") != manifest.hash:
        kept[what] = {"run": manifest.hash, "values": found}
        VALUES.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    assert kept.get(what, {}).get("run") == manifest.hash, (
        f"{what} has no values yet: PIPELINE_WRITE_VALUES=1"
    )
    far = moved(found, kept[what]["values"])
    assert not far, (
        f"the values of {what} moved, raise the version of stage={what.split()[0]}: {'; '.join(far)}"
    )


def moved(found: dict[str, Any], was: dict[str, Any]) -> list[str]:
    """Return the values that have changed, with old and new value."""
    assert found.keys() == was.keys()
    ours, theirs = dict(flat(found)), dict(flat(was))
    told = [f"{name}: no longer there, or new" for name in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        tolerance = TOLERANCES.get(name.partition("/")[0], {"rel": 1e-9})
        number = isinstance(theirs[name], float)
        if ours[name] != (pytest.approx(theirs[name], **tolerance) if number else theirs[name]):
            told.append(f"{name}: {theirs[name]} -> {ours[name]}")
    return sorted(told)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten {"a": {"b": [1]}} to ("a/b/0", 1)."""
    if not isinstance(value, dict | list):
        yield name, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from flat(inner, f"{name}/{key}" if name else str(key))


# --- data ---


def files(folder: Path) -> dict[str, str]:
    """sha256 of the data files. The tokenizer's format is its library's."""
    kept = read_manifest(folder).files  # type: ignore[union-attr]
    return {name: file["sha256"] for name, file in kept.items() if name.endswith(".jsonl")}


def test_data(world: Path, math_expert: Path) -> None:
    held("data world", world, files(world))
    folder = world.parent / read_manifest(math_expert).parents["data"].name  # type: ignore[union-attr]
    held("data", folder, files(folder))


# --- training ---


def training(folder: Path, start: dict[str, Any]) -> dict[str, Any]:
    """Losses, gradient norm, and how far each tensor went from its start."""
    first, *later = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    end = load_file(folder / "model.safetensors")
    return {
        "first loss": first["loss"],
        "first gradient norm": first["grad_norm"],
        "later losses": [row["loss"] for row in later],
        "tokens": [row["tokens"] for row in (first, *later)],
        "displacements": {name: (end[name] - start[name]).norm().item() for name in sorted(end)},
    }


@pytest.fixture(scope="module")
def train(make_run: Make, world: Path) -> Make:
    """Four steps from the shipped base on four rows each."""

    def make(*words: str) -> Path:
        start = [
            "stage=sft",
            "model=sandbox",
            f"data_root={world}",
            "expert=math",
            "recipe=sandbox_math",
        ]
        return make_run(*start, *FEW, "sft.steps=4", *words)

    return make


@pytest.fixture(scope="module")
def pretrain(make_run: Make, base: Path, world: Path) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """Run two steps of cpt from nothing; return them and transformers' first weights."""
    from tiny_words import TINY
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    def make(*words: str) -> tuple[Path, dict[str, Any]]:
        data = [
            "expert=sandbox_text",
            f"data_root={world}",
            "recipe=sandbox_math",
            "sft.packing=false",
        ]
        folder = make_run("stage=cpt", *TINY, *data, *FEW, *words)
        set_seed(0)
        return (
            folder,
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict(),
        )

    return make


def test_cpt(pretrain: Callable[..., tuple[Path, dict[str, Any]]]) -> None:
    folder, start = pretrain()
    held("cpt", folder, training(folder, start))


def test_sft(train: Make) -> None:
    folder = train()
    held("sft", folder, training(folder, load_file(BASE / "model.safetensors")))


def test_select(make_run: Make, train: Make) -> None:
    folder = train("data.size=20", "data.validation=4", "sft.snapshot_every=6")
    words = ["select=unreasonable", "select.snapshots=all", f"checkpoints=[{folder.name}]"]
    folder = make_run("stage=select", *words)
    choice = json.loads((folder / "choice.json").read_text())
    losses = {str(one["step"]): one["values"]["validation_loss"] for one in choice["ranking"]}
    ranks = {str(one["step"]): one["rank"] for one in choice["ranking"]}
    first, second = sorted(losses.values())[:2]
    assert second > first * (
        1 + 2 * TOLERANCES["validation losses"]["rel"]
    )  # rounding does not change the choice
    held(
        "select",
        folder,
        {"chosen": choice["chosen"]["step"], "ranks": ranks, "validation losses": losses},
    )


# --- merging ---


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write two experts of fixed bytes that are exact on any machine.

    They are the shipped base and multiples of 2^-20 below 0.004.
    """
    folders = []
    for name, factor in (("expert-1", 2654435761), ("expert-2", 2246822519)):
        folder = shutil.copytree(BASE, tmp_path_factory.mktemp("fixed") / name)
        (folder / "manifest.json").unlink()  # which has the base's digests
        raw = bytearray((folder / "model.safetensors").read_bytes())
        weights = np.frombuffer(raw, "<f4", offset=8 + int.from_bytes(raw[:8], "little"))
        index = np.arange(len(weights), dtype=np.uint32)
        mixed = (index * np.uint32(factor)).view(np.int32) >> 20  # -2048 to 2047
        weights += (mixed * (index // 100 % 3)).astype(np.float32) * np.float32(
            2**-20
        )  # some rows move further
        (folder / "model.safetensors").write_bytes(raw)
        folders.append(str(folder))
    return folders


MERGED = {
    "layer_swap": (
        "merge=layer_swap merge.math={0} merge.language={1} merge.bottom_layers=2"
        " merge.top_layers=1 merge.bottom_transition=1"
    ),
    "soup": "merge=soup merge.experts=[{0},{1}] merge.weights=[0.3,0.7]",
    "ties": "merge=ties merge.experts=[{0},{1}] merge.density=0.2",
    "task_arithmetic": "merge=task_arithmetic merge.experts=[{0},{1}] merge.scale=0.7",
    "reset": "merge=reset merge.expert={0} merge.layers=[0,3]",
}


@pytest.mark.parametrize("method", MERGED)
def test_merge(make_run: Make, experts: list[str], method: str) -> None:
    words = MERGED[method].format(*experts).split()
    folder = make_run("stage=merge", *words, "merge.base=package:data/sandbox_base")
    held(f"merge {method}", folder, {"root": read_manifest(folder).weights_root})  # type: ignore[union-attr]


def test_analyze(make_run: Make, experts: list[str]) -> None:
    words = [
        f"checkpoint=[{','.join(experts)}]",
        "base=package:data/sandbox_base",
        "analyze.threshold=1e-3",
    ]
    folder = make_run("stage=analyze", *words)
    rows = list(csv.DictReader((folder / "delta.csv").read_text().splitlines()))
    columns = ("mean", "share", "norm", "relative", "same")
    changes = {
        f"{row['expert']} {row['parameter']}": [float(row[column]) for column in columns]
        for row in rows
        if row["parameter"]
        in ("model.embed_tokens.weight", "model.layers.7.self_attn.q_proj.weight")
    }
    assert len(changes) == 4
    held("analyze", folder, {"changes": changes})


# --- evaluation ---


def test_eval(make_run: Make, world: Path) -> None:
    asked = ["eval=sandbox", "eval.max_gen_toks=8", "eval.limit=3", "languages=[en,qac]"]
    folder = make_run(
        "stage=eval", "checkpoint=package:data/sandbox_base", f"data_root={world}", *asked
    )
    rows = json.loads((folder / "scores.json").read_text())["rows"]
    named = ("task", "language", "pair", "subject", "metric", "filter")
    answers = {path.stem: lines(path) for path in sorted((folder / "samples").iterdir())}
    told = [line for one in answers.values() for line in one]
    chosen = [list(line["loglikelihoods"].values()) for line in told if "loglikelihoods" in line]
    written = [line for line in told if "loglikelihoods" not in line]
    assert len(chosen) == 12 and len(written) == 12
    assert min(sorted(one)[-1] - sorted(one)[-2] for one in chosen) > NARROW
    assert min(margin(line["prompt"], line["response"]) for line in written) > NARROW
    found = {
        "scores": {" ".join(str(row[key]) for key in named): row["value"] for row in rows},
        "answers": {name: [line["response"] for line in one] for name, one in answers.items()},
        "log-likelihoods": chosen,
    }
    held("eval", folder, found)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def margin(prompt: str, answer: str) -> float:
    """Return the least distance in logits between the chosen token and the next.

    It is over the eight tokens that give `answer`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(BASE),
        AutoTokenizer.from_pretrained(BASE),
    )
    asked = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    made = model.generate(
        **asked, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    told = tokenizer.decode(
        made.sequences[0, asked["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert told.startswith(answer)
    best = [logits[0].topk(2).values for logits in made.logits]
    return min((first - second).item() for first, second in best)
