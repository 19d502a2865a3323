"""Made-up results for the report: evaluation folders with scores and samples, without a model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from pipeline.report.load.contents import CellResult, Results, RunResult

SKILL = {
    "base": 0.23,
    "math expert": 0.26,
    "language expert": 0.45,
    "soup": 0.44,
    "TIES": 0.43,
    "layer swap": 0.48,
}
NASTY = 'six </script><script>alert("x")</script> & <b>7</b> \u2028 || \u0e51'


def score(task: str, value: float, n: int, language: str, pair: str | None = None, **more: Any) -> dict[str, Any]:
    metric, filter_name = {"mgsm": ("exact_match", "flexible-extract"), "flores": ("chrf++", "none")}.get(
        task, ("acc", "none")
    )
    error = (value * (1 - value) / n) ** 0.5 if metric != "chrf++" else None
    row = {
        "task": task,
        "language": language,
        "pair": pair,
        "subject": None,
        "num_fewshot": 0,
        "metric": metric,
    }
    return row | {"filter": filter_name, "value": value, "stderr": error, "n": n} | more


def write_eval(folder: Path, rows: list[dict], samples: dict[str, list[dict]] | None = None) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "scores.json").write_text(json.dumps({"rows": rows, "harness": {}}))
    for name, lines in (samples or {}).items():
        (folder / "samples" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def sample(doc: int, response: str, correct: bool | None, **more: Any) -> dict[str, Any]:
    extracted = response.split()[-1] if response.split() else "[invalid]"
    made = {
        "doc_id": doc,
        "prompt": f"Question {doc}: how many?\nAnswer:",
        "target": "7",
        "response": response,
    }
    return (
        made
        | {
            "extracted": extracted,
            "correct": correct,
            "filter": "flexible-extract",
            "prompt_hash": "",
            "scores": {},
        }
        | more
    )


def made_up(root: Path, languages: list[str], seeds: list[int], n: int = 100) -> Results:
    """Six rows; base and math expert are shared by the languages, the base by the seeds too."""
    cells, runs = [], {}
    for row, skill in SKILL.items():
        for language in languages:
            for seed in seeds:
                of = "base" if row == "base" else f"{row}-s{seed}"
                own = "" if row in ("base", "math expert") else f"-{language}"
                name = f"mgsm-{of.replace(' ', '-')}{own}-{skill * 100:.0f}ab"
                if not (root / name).exists():
                    write_made_up(root / name, skill, languages if not own else [language], name, n)
                cells.append(CellResult(row, language, seed, name, root / name))
                runs[name] = RunResult(name, "eval", root / name, model=of, seconds=12.3)
    for seed in seeds:
        for label in ["math expert", *(f"{language} expert" for language in languages)]:
            folder = root / f"sft-{label.replace(' ', '-')}-s{seed}"
            folder.mkdir(parents=True)
            chance = random.Random(f"{label}{seed}")
            with (folder / "log.jsonl").open("w") as log:
                for step in range(10, 610, 10):
                    loss = 0.8 + 2.5 / (1 + step / 60) + chance.gauss(0, 0.05)
                    log.write(json.dumps({"step": step, "loss": loss, "learning_rate": 1e-3, "grad_norm": 1.0}) + "\n")
                    if step % 150 == 0:
                        log.write(json.dumps({"step": step, "validation_loss": loss + 0.1}) + "\n")
            runs[folder.name] = RunResult(folder.name, "sft", folder, label, model="base-1", seconds=95.0)
    return Results(
        table="sandbox",
        title="Layer swapping in the small world",
        note="A made-up language and a tiny model: the numbers show that the machinery works, no more.",
        command="python -m pipeline stage=table table=sandbox",
        languages=languages,
        seeds=seeds,
        rows=list(SKILL),
        cells=cells,
        runs=list(runs.values()),
        seconds=412.0,
        versions={"pipeline": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "lm_eval": "0.4.13"},
        machine={"device": "cpu", "threads": 2, "cores": 2},
        git={"commit": "3fa9c1d2", "dirty": False},
    )


def write_made_up(folder: Path, skill: float, languages: list[str], name: str, n: int) -> None:
    chance = random.Random(name)
    rows, samples = [], {}
    for language in languages:
        for where, level in ((language, skill), ("en", 0.5 + skill / 2)):
            lines = []
            for doc in range(n):
                right = chance.random() < level
                answer = 7 if right else chance.randint(8, 99)
                text = f"Ana had {doc} loko and got {7 - doc}. {doc} + {7 - doc} = 7. The answer is {answer}"
                lines.append(
                    sample(
                        doc,
                        text,
                        right,
                        prompt=f"Question: Ana mika {doc} loko, ta {7 - doc} so? ({where})\nAnswer:",
                    )
                )
            samples[f"mgsm.{where}"] = lines
            rows.append(score("mgsm", sum(line["correct"] for line in lines) / n, n, where))
            rows.append(rows[-1] | {"filter": "strict-match", "value": rows[-1]["value"] / 2})
        for task, level in (("belebele", 0.25 + skill / 2), ("global_mmlu", 0.24 + chance.random() / 20)):
            letters = [chance.choice("ABCD") for _ in range(n)]
            samples[f"{task}.{language}"] = [
                sample(
                    doc,
                    letter,
                    chance.random() < level,
                    prompt=f"Passage {doc}. Which?\nA. one\nB. two\nC. three\nD. four\nAnswer:",
                    target="B",
                )
                for doc, letter in enumerate(letters)
            ]
            right = sum(bool(line["correct"]) for line in samples[f"{task}.{language}"])
            rows.append(score(task, right / n, n, language))
        for pair in (f"en-{language}", f"{language}-en"):
            samples[f"flores.{pair}"] = [
                sample(doc, f"mika {name} ta {doc}", None, scores={"chrf++": chance.uniform(5, 60)}) for doc in range(n)
            ]
            rows.append(score("flores", 10 + 60 * skill + chance.random(), n, language, pair))
            rows.append(rows[-1] | {"metric": "bleu", "value": 3.2})
    unique = {(r["task"], r["pair"] or r["language"], r["metric"], r["filter"]): r for r in rows}
    write_eval(folder, list(unique.values()), samples)
