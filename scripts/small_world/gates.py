#!/usr/bin/env python
"""The gates of docs/explanation/small_world.md on development items: base, experts and controls, and no merge.

    python scripts/small_world/gates.py                                  # the shipped base; about a quarter of an hour
    python scripts/small_world/gates.py --base RUN --record ''           # a candidate

Trains the math and the language expert by their recipes, and one control: the base on qac problems, which no training
set of the pipeline holds. Scores 500 items a language and benchmark by stage=eval, and lets base and language expert
answer questions on who has what by greedy decoding. Record: results/bench/small_world_gates.json.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from scipy.stats import binomtest

from pipeline.config.compose import compose
from pipeline.launch.launchers import make_single_run
from pipeline.runs.find import find_run
from pipeline.runs.manifest import read_manifest
from pipeline.stages.rows import RUN_STAGES
from small_world.text import lookup_text, make_lookup
from small_world.world import POOL, ConstructedWorld, draw_problem, draw_reading

LANGUAGES = ("en", "qaa", "qab", "qac")
SCORED = {"math": ("en", "qac"), "language": ("en", "qac"), "control": ("qac",)}  # the base in all
ITEMS = 500
Samples = dict[str, list[dict[str, Any]]]  # "mgsm.en" -> a record a question


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="package:data/sandbox_base", help="the base's run")
    parser.add_argument("--runs", default="runs", help="runs_dir")
    parser.add_argument("--record", default="results/bench/small_world_gates.json", help="file to write; '' for none")
    parser.add_argument("--only-base", action="store_true", help="train nothing")
    parser.add_argument("--math", nargs="*", default=[], help="further words of the math expert, sft.steps=200 say")
    parser.add_argument("--language", nargs="*", default=[], help="further words of the language expert")
    asked = parser.parse_args()

    def made(*words: str) -> Path:
        return make_single_run(compose([f"runs_dir={asked.runs}", "tracking.mode=disabled", *words]))  # type: ignore[arg-type]

    world = made("stage=data", "expert=sandbox")
    items = made("stage=data", "expert=sandbox_items", f"expert.items.dev={ITEMS}", f"data_root={world}")
    base = find_run(asked.base, Path(asked.runs), "--base").folder
    start = ("stage=sft", "model=trained", f"model.path={base}", "threads=1")
    models, seconds = {"base": base}, dict[str, float]()
    RUN_STAGES["sft"].maker()  # imports what trains, which is not to be counted
    if not asked.only_base:
        own = control_problems(Path(asked.runs) / "control")
        math = ("expert=math", "recipe=sandbox_math", f"data_root={world}", *asked.math)
        language = ("expert=qac", "recipe=sandbox_language", f"data_root={world}", *asked.language)
        control = ("expert=sandbox_text", "recipe=sandbox_math", f"data_root={own}")
        for name, words in {"math": math, "language": language, "control": control}.items():
            before = time.process_time()
            models[name] = made(*start, *words, "redo=true")
            seconds[name] = round(time.process_time() - before, 1)
    scores = ("stage=eval", "eval=sandbox", "eval.split=dev", f"data_root={items}")
    evaluated = {
        name: made(*scores, f"checkpoint={folder}", f"languages=[{','.join(SCORED.get(name, LANGUAGES))}]")
        for name, folder in models.items()
    }
    samples = {name: samples_of(folder) for name, folder in evaluated.items()}
    told = {name: greedy(models[name]) for name in ("base", "language") if name in models}
    vectors = {name: vector(models[name], base) for name in ("math", "language") if name in models}
    gates = base_gates(samples["base"]) + (expert_gates(samples, vectors, seconds, told) if vectors else [])
    print("\n".join(f"{'met   ' if met else 'MISSED'} {what}: {value}" for what, value, met in gates))
    measured = {name: measures(of) for name, of in samples.items()}
    print(json.dumps({"scores": measured, "greedy": told, "vectors": vectors, "seconds": seconds}, indent=1))
    if asked.record:
        rows = {name: json.loads((folder / "scores.json").read_text())["rows"] for name, folder in evaluated.items()}
        manifest = read_manifest(base)
        assert manifest is not None
        bits = {name: {task: bits_of(rows) for task, rows in of.items()} for name, of in samples.items()}
        named = [{"gate": what, "value": value, "met": met} for what, value, met in gates]
        record = {
            "base": manifest.weights["root"], "items": ITEMS, "gates": named, "measures": measured, "greedy": told,
            "vectors": vectors, "seconds": seconds, "rows": rows, "right": bits,
        }  # fmt: skip
        Path(asked.record).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not all(met for _, _, met in gates[:6]):  # of the base
        sys.exit("the base misses a gate")


# ---------------------------------------------------------------------------------------------------- what is measured


def control_problems(folder: Path) -> Path:
    """A data_root with English's word problems in qac: what no training set of the pipeline holds."""
    world = kept_apart()
    draw, file = random.Random("0 control"), folder / "text" / "train.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    texts = (world.problem_text(world.fresh(draw, draw_problem), world.words["qac"]) for _ in range(6000))
    lines = (json.dumps({"prompt": prompt, "completion": completion}) + "\n" for prompt, completion in texts)
    file.write_text("".join(lines), encoding="utf-8")
    return folder


def kept_apart() -> ConstructedWorld:
    """The world, which draws no item of a benchmark any more."""
    world = ConstructedWorld(0)
    for split in ("exemplars", "dev", "test"):
        for kind, make in {"problem": draw_problem, "reading": draw_reading}.items():
            world.hold_out(kind, split, POOL, make)
    return world


def samples_of(evaluation: Path) -> Samples:
    return {
        file.stem: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in sorted((evaluation / "samples").glob("*.jsonl"))
    }


def right(rows: list[dict[str, Any]]) -> list[bool]:
    """Whether each is right; a translation, whether it is the sentence word for word."""
    return [row["extracted"] == row["target"] if row["correct"] is None else row["correct"] for row in rows]


def bits_of(rows: list[dict[str, Any]]) -> str:
    """A digit a question: 1, right."""
    return "".join(str(int(one)) for one in right(rows))


def measures(samples: Samples) -> dict[str, float]:
    """Per cent right, and of English equations the true ones."""
    found = {name: round(100 * statistics.fmean(right(rows)), 1) for name, rows in samples.items()}
    if "mgsm.en" in samples:
        found["mgsm.en equations true"] = round(100 * true_equations(samples["mgsm.en"]), 1)
    return found


def true_equations(rows: list[dict[str, Any]]) -> float:
    """The share of the equations in the answers that hold."""
    signs = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    found = [one for row in rows for one in re.findall(r"(\d+) ([-+*]) (\d+) = (-?\d+)", row["response"])]
    return statistics.fmean(signs[sign](int(left), int(other)) == int(result) for left, sign, other, result in found)


def better(ours: list[bool], theirs: list[bool]) -> tuple[float, float]:
    """(points, p) of the same questions: the exact sign test on those that one of the two has right."""
    won, lost = (sum(a and not b for a, b in zip(*two, strict=True)) for two in ((ours, theirs), (theirs, ours)))
    p = float(binomtest(won, won + lost).pvalue) if won + lost else 1.0
    return 100 * (won - lost) / len(ours), p


def vector(expert: Path, base: Path) -> float:
    """The norm of what an expert's training added, over the norm of the base's weights."""
    ours, theirs = load_file(expert / "model.safetensors"), load_file(base / "model.safetensors")
    moved = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in theirs)
    return (moved / sum(float(one.double().square().sum()) for one in theirs.values())) ** 0.5


def greedy(model: Path) -> dict[str, float]:
    """Per cent of worded replies and of look-ups that greedy decoding gets right, in English and in qac."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    world = ConstructedWorld(0)
    items = world.hold_out("reading", "dev", ITEMS, draw_reading)
    found = {}
    for language in ("en", "qac"):
        draw, words = random.Random("0 lookups of the gates"), world.words[language]
        asked = {
            "reply": [world.reading_text(item, words) for item in items],
            "lookup": [lookup_text(make_lookup(draw), words) for _ in range(ITEMS)],
            "worked lookup": [lookup_text(make_lookup(draw), words, worked=True) for _ in range(ITEMS)],
        }
        for kind, texts in asked.items():
            answers = answered(network, tokenizer, [prompt for prompt, _ in texts])
            hits = [answer == completion for answer, (_, completion) in zip(answers, texts, strict=True)]
            found[f"{kind} {language}"] = round(100 * statistics.fmean(hits), 1)
    return found


@torch.inference_mode()
def answered(network: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    answers = []
    for first in range(0, len(prompts), 100):
        batch = tokenizer(prompts[first : first + 100], return_tensors="pt", padding=True, return_token_type_ids=False)
        made = network.generate(**batch, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        answers += [text.strip() for text in texts]
    return answers


# --------------------------------------------------------------------------------------------------------- the gates

Gate = tuple[str, str, bool]  # what has to hold, what was measured, whether it does


def base_gates(samples: Samples) -> list[Gate]:
    got = measures(samples)
    en, qaa, qab, qac = (got[f"mgsm.{language}"] for language in LANGUAGES)
    equations, read = got["mgsm.en equations true"], got["belebele.qaa"]
    return [
        ("base, English math 40 to 65 %", f"{en}", 40 <= en <= 65),
        ("base, English equations true 90 %", f"{equations}", equations >= 90),
        ("base, qaa math within 15 points of English", f"{qaa}", qaa >= en - 15),
        ("base, qab math at least half of qaa", f"{qab}", qab >= qaa / 2),
        ("base, qac math 10 to 30 %", f"{qac}", 10 <= qac <= 30),
        ("base, reading in qaa 60 %", f"{read}", read >= 60),
    ]


def expert_gates(
    samples: dict[str, Samples], vectors: dict[str, float], seconds: dict[str, float], told: dict[str, dict[str, float]]
) -> list[Gate]:
    base, math, language, control = (measures(samples[name]) for name in ("base", "math", "language", "control"))
    gates = [
        difference("math expert, English math 15 points above the base", math, base, "mgsm.en", 15),
        difference("math expert, qac math not below the base", math, base, "mgsm.qac", 0),
        difference("language expert, English math at most 2 points below the base", language, base, "mgsm.en", -2),
        difference("language expert, qac math at most 1 point below the base", language, base, "mgsm.qac", -1),
    ]
    for what, name in {
        "facts": "global_mmlu.qac", "replies": "belebele.qac", "translation to qac": "flores.en-qac",
        "translation from qac": "flores.qac-en",
    }.items():  # fmt: skip
        points, p = better(right(samples["language"][name]), right(samples["base"][name]))
        gates.append((
            f"language expert, {what} in qac better than the base", f"{points:+.1f}, p = {p:.2g}",
            points > 0 and p < 0.05,
        ))  # fmt: skip
    ratio = vectors["language"] / vectors["math"]
    read = min(told["language"]["reply qac"], told["language"]["lookup qac"])
    return [
        *gates,
        ("language expert, task vector at most twice the math expert's", f"{ratio:.2f} times", ratio <= 2),
        ("experts, trained in 60 CPU seconds each", f"{seconds['math']}, {seconds['language']} s", max(
            seconds["math"], seconds["language"]) <= 60),
        difference("control on qac problems, 15 points above the math expert in qac", control, math, "mgsm.qac", 15),
        ("language expert, greedy replies and look-ups in qac 80 %", f"{read}", read >= 80),
    ]  # fmt: skip


def difference(what: str, one: dict[str, float], other: dict[str, float], name: str, least: float) -> Gate:
    points = round(one[name] - other[name], 1)
    return what, f"{one[name]} ({points:+.1f})", points >= least


if __name__ == "__main__":
    main()
