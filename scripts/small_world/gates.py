#!/usr/bin/env python
"""Measure the requirements of docs/explanation/small_world.md on development questions.

    python scripts/small_world/gates.py                          # the shipped base: ten minutes
    python scripts/small_world/gates.py --base RUN --record ''   # another base

The script trains the math expert and the language expert by their recipes, and a control: the base
trained on word problems in qac, which no training set of the pipeline has. The record is
results/bench/small_world_gates.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from scipy.stats import binomtest  # noqa: E402

from pipeline.config.compose import compose  # noqa: E402
from pipeline.launch.launchers import make_single_run  # noqa: E402
from pipeline.runs.find import find_run  # noqa: E402
from pipeline.runs.manifest import read_manifest  # noqa: E402
from small_world.base import world_without_benchmarks  # noqa: E402
from small_world.world import draw_problem  # noqa: E402

# The data run of table=sandbox
DEMO_WORLD = ("stage=data", "expert=sandbox", "expert.world.items=250")
LANGUAGE_TRAINING = (
    "recipe=sandbox_language",
    "sft=partial",
    "partition=B",
    "partition.scale_to_depth=true",
)
ITEMS = 500  # development questions per benchmark and language
# Model -> the languages of its evaluation
LANGUAGES = {
    "base": "en,qaa,qac",
    "math": "en,qaa,qac",
    "language": "en,qac",
    "control": "qac",
}
Samples = dict[str, list[dict[str, Any]]]  # "mgsm.en" -> one record per question


@dataclass(frozen=True)
class Gate:
    """One requirement, what was measured, and whether it is met."""

    gate: str
    value: str
    met: bool


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="package:data/sandbox_base", help="the base's run")
    parser.add_argument(
        "--world",
        default=None,
        help="a folder of scripts/make_small_world.py; default: the shipped",
    )
    parser.add_argument("--seed", type=int, default=0, help="of that world")
    parser.add_argument("--runs", default="runs", help="runs_dir")
    parser.add_argument(
        "--record",
        default="results/bench/small_world_gates.json",
        help="file to write; '' for none",
    )
    asked = parser.parse_args()
    base = find_run(asked.base, Path(asked.runs), "--base").folder
    models = train_experts(base, asked.runs, asked.world, asked.seed)
    samples, rows = score(models, asked.runs, asked.world)
    gates = find_gates(samples)
    for gate in gates:
        verdict = "MISSED"
        if gate.met:
            verdict = "met   "
        print(f"{verdict} {gate.gate}: {gate.value}")
    percentages = {name: measures(found) for name, found in samples.items()}
    print(json.dumps(percentages, indent=1))
    if asked.record:
        manifest = read_manifest(base)
        assert manifest is not None
        right = {name: digits(found) for name, found in samples.items()}
        record = {
            "base": manifest.weights["root"],
            "items": ITEMS,
            "gates": [asdict(gate) for gate in gates],
            "measures": percentages,
            "rows": rows,
            "right": right,
        }
        Path(asked.record).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not all(gate.met for gate in gates):
        sys.exit("A gate is missed.")


# --- models and their scores ---


def make_run(runs: str, *words: str) -> Path:
    return make_single_run(compose([f"runs_dir={runs}", "tracking.mode=disabled", *words]))  # type: ignore[arg-type]


def train_experts(base: Path, runs: str, world: str | None, seed: int) -> dict[str, Path]:
    """Train both experts and the control. Finished trainings of the demo are reused."""
    data_root = world or str(make_run(runs, *DEMO_WORLD))
    problems = write_control_problems(Path(runs) / "control", seed)
    shared = ["stage=sft", "model=trained", f"model.path={base}", "threads=1"]
    math = ["expert=math", "recipe=sandbox_math", f"data_root={data_root}"]
    language = ["expert=qac", *LANGUAGE_TRAINING, f"data_root={data_root}"]
    control = ["expert=sandbox_text", "recipe=sandbox_math", f"data_root={problems}"]
    models = {"base": base}
    models["math"] = make_run(runs, *shared, *math)
    models["language"] = make_run(runs, *shared, *language)
    models["control"] = make_run(runs, *shared, *control)
    return models


def write_control_problems(folder: Path, seed: int) -> Path:
    """Write a data_root with worked word problems in qac."""
    world, draw = world_without_benchmarks(seed), random.Random(f"{seed} control")
    file = folder / "text" / "train.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", encoding="utf-8") as opened:
        for _ in range(6000):
            problem = world.fresh(draw, draw_problem)
            prompt, completion = world.problem_text(problem, world.words["qac"])
            row = {"prompt": prompt, "completion": completion}
            opened.write(json.dumps(row) + "\n")
    return folder


def score(
    models: dict[str, Path], runs: str, world: str | None
) -> tuple[dict[str, Samples], dict[str, Any]]:
    """Score the models on development questions.

    Returns their answers and the rows of their scores.
    """
    data_root = world
    if data_root is None:
        shipped = make_run(runs, *DEMO_WORLD)
        words = ["stage=data", "expert=sandbox_items", f"expert.items.dev={ITEMS}"]
        data_root = str(make_run(runs, *words, f"data_root={shipped}"))
    samples, rows = {}, {}
    for name, folder in models.items():
        words = ["stage=eval", "eval=sandbox", "eval.split=dev", f"data_root={data_root}"]
        words += [f"checkpoint={folder}", f"languages=[{LANGUAGES[name]}]"]
        scored = make_run(runs, *words)
        scores = json.loads((scored / "scores.json").read_text(encoding="utf-8"))
        rows[name] = scores["rows"]
        samples[name] = read_samples(scored)
    return samples, rows


def read_samples(evaluation: Path) -> Samples:
    samples = {}
    for file in sorted((evaluation / "samples").glob("*.jsonl")):
        lines = file.read_text(encoding="utf-8").splitlines()
        samples[file.stem] = [json.loads(line) for line in lines]
    return samples


def is_right(record: dict[str, Any]) -> bool:
    """Return True if an answer is right.

    A translation is right if it equals the sentence word for word.
    """
    if record["correct"] is None:
        return bool(record["extracted"] == record["target"])
    return bool(record["correct"])


def digits(samples: Samples) -> dict[str, str]:
    """Return a string for each benchmark with one digit a question: 1 if the answer is right."""
    found = {}
    for name, records in samples.items():
        ones = [int(is_right(record)) for record in records]
        found[name] = "".join(map(str, ones))
    return found


def measures(samples: Samples) -> dict[str, float]:
    """Return the percentage of right answers for each benchmark."""
    found = {}
    for name, records in samples.items():
        share = statistics.fmean(is_right(record) for record in records)
        found[name] = round(100 * share, 1)
    return found


# --- the gates ---

LANGUAGE_SKILLS = {
    "belebele.qac": "reading qac",
    "global_mmlu.qac": "facts in qac",
    "flores.en-qac": "translation to qac",
    "flores.qac-en": "translation from qac",
}


def find_gates(samples: dict[str, Samples]) -> list[Gate]:
    """Return the gates of docs/explanation/small_world.md."""
    base, math = samples["base"], samples["math"]
    language, control = samples["language"], samples["control"]
    gates = []
    for name, points in {"English": 10, "qaa": 8, "qac": 4}.items():
        gate = f"math expert above the base in {name} math: {points} points"
        benchmark = f"mgsm.{name}".replace("English", "en")
        gates.append(difference(gate, math, base, benchmark, points))
    for benchmark, skill in LANGUAGE_SKILLS.items():
        gate = f"language expert better than the base in {skill}"
        gates.append(gain(gate, language, base, benchmark))
    gate = "language expert at most 3 points below the base in English math"
    gates.append(difference(gate, language, base, "mgsm.en", -3))
    gate = "control above the math expert in qac math: 15 points"
    gates.append(difference(gate, control, math, "mgsm.qac", 15))
    return gates


def difference(gate: str, one: Samples, other: Samples, name: str, least: float) -> Gate:
    value = measures(one)[name]
    points = round(value - measures(other)[name], 1)
    return Gate(gate, f"{value} ({points:+.1f})", points >= least)


def gain(gate: str, one: Samples, other: Samples, name: str) -> Gate:
    """Return a gate that requires a significant gain."""
    ours = [is_right(record) for record in one[name]]
    theirs = [is_right(record) for record in other[name]]
    points, p = better(ours, theirs)
    value = f"{measures(one)[name]} ({points:+.1f}), p = {p:.2g}"
    return Gate(gate, value, points > 0 and p < 0.05)


def better(ours: list[bool], theirs: list[bool]) -> tuple[float, float]:
    """Return (points, p) of an exact sign test on questions that only one model answers."""
    won = sum(our and not their for our, their in zip(ours, theirs, strict=True))
    lost = sum(their and not our for our, their in zip(ours, theirs, strict=True))
    p = 1.0
    if won + lost:
        p = float(binomtest(won, won + lost).pvalue)
    return 100 * (won - lost) / len(ours), p


if __name__ == "__main__":
    main()
