"""Made-up results for the report: evaluation folders with scores and samples, without a model."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeline.benchmarks import primary_metric
from pipeline.evaluate.records import ScoreRow, read_scores
from pipeline.report.compare import correct_contrasts
from pipeline.report.load.answers import Evaluation, read_answers, sample_files
from pipeline.report.load.contents import CellResult, CellScore, Results, RunResult

SKILL = {
    "base": 0.23,
    "math expert": 0.26,
    "language expert": 0.45,
    "soup": 0.44,
    "TIES": 0.43,
    "layer swap": 0.48,
}
NASTY = 'six </script><script>alert("x")</script> & <b>7</b> \u2028 || \u0e51'


def score(
    task: str, value: float, n: int, language: str, pair: str | None = None, **more: Any
) -> dict[str, Any]:
    metric, filter_name = primary_metric(task)
    error = (value * (1 - value) / n) ** 0.5 if metric != "chrf++" else None
    row = ScoreRow(task, language, pair, None, 0, metric, filter_name, value, error, n)
    return asdict(row) | more


def write_eval(
    folder: Path, rows: list[dict], samples: dict[str, list[dict]] | None = None
) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "scores.json").write_text(json.dumps({"rows": rows, "harness": {}}))
    for name, lines in (samples or {}).items():
        (folder / "samples" / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    return folder


def sample(doc: int, response: str, correct: bool | None, **more: Any) -> dict[str, Any]:
    asked = {
        "doc_id": doc,
        "group": f"passage of {doc}",
        "prompt": f"Question {doc}: how many?\nAnswer:",
        "target": "7",
    }
    extracted = response.split()[-1] if response.split() else "[invalid]"
    answered = {
        "response": response,
        "extracted": extracted,
        "correct": correct,
        "filter": "flexible-extract",
    }
    return asked | answered | {"prompt_hash": "", "scores": {}} | more


COLUMNS = {  # name of a column -> its task, language and pair
    "mgsm": ("mgsm", "qac", None),
    "mgsm en": ("mgsm", "en", None),
    "belebele": ("belebele", "qac", None),
    "global_mmlu": ("global_mmlu", "qac", None),
    "flores to": ("flores", "qac", "en-qac"),
    "flores from": ("flores", "qac", "qac-en"),
}


def results_of(
    cells: Sequence[CellResult], folders: Mapping[str, Path] | None = None, **more: Any
) -> Results:
    """Return a table of these cells. `folders` are those of its evaluations, by name."""
    rows, columns = (
        list(dict.fromkeys(getattr(cell, side) for cell in cells)) for side in ("row", "column")
    )
    of_folders = [RunResult(name, "eval", folder) for name, folder in (folders or {}).items()]
    runs = [*of_folders, *more.pop("runs", [])]
    fixed = {"rows": rows, "columns": columns, "runs": runs, **read(cells, runs)}
    fixed["contrasts"] = correct_contrasts(more.pop("contrasts", []), more.get("primary", []))
    return Results(
        **{"table": "t", "title": "T", "note": "", "command": "python -m pipeline"} | fixed | more
    )


def read(cells: Sequence[CellResult], runs: Iterable[RunResult]) -> dict[str, Any]:
    """Return the cells with their scores, the evaluations of these runs, and their answers."""
    folders = {run.name: run.folder for run in runs if (run.folder / "scores.json").is_file()}
    stored = {
        name: Evaluation(*read_scores(folder / "scores.json"), sample_files(folder))
        for name, folder in folders.items()
    }
    shown = [
        replace(cell, scores=[with_rows(cell, score, stored) for score in cell.scores])
        for cell in cells
    ]
    answers, parquet = read_answers(stored)
    return {"cells": shown, "evaluations": stored, "answers": answers, "parquet": parquet}


def with_rows(
    cell: CellResult, score: CellScore, evaluations: Mapping[str, Evaluation]
) -> CellScore:
    wanted = (cell.task, *primary_metric(cell.task))
    rows = evaluations[score.run].rows if score.run in evaluations else ()
    shown = [
        row
        for row in rows
        if (row.task, row.metric, row.filter) == wanted and cell.pair in (None, row.pair)
    ]
    return replace(score, rows=shown)


def made_up(root: Path, seeds: Sequence[int] = (0,)) -> Results:
    """Six models in six columns; the base is one model for all seeds."""
    cells, runs, values = [], {}, {}
    for column, (task, where, pair) in COLUMNS.items():
        for row, skill in SKILL.items():
            others = {"belebele": 0.25 + skill / 2, "global_mmlu": 0.26}
            level = 0.5 + skill / 2 if where == "en" else others.get(task, skill)
            scores = []
            for seed in seeds[:1] if row == "base" else seeds:
                model = "base" if row == "base" else f"{row}-s{seed}"
                name = f"eval-{task}_0shot-{model.replace(' ', '-')}-{where}-{skill * 100:.0f}ab"
                if name not in runs:  # else the other pair of its translations
                    values[name] = write_made_up(root / name, task, where, level, 40)
                    runs[name] = RunResult(name, "eval", root / name, model=model, seconds=12.3)
                scores.append(CellScore(name, {} if row == "base" else {"seed": str(seed)}))
            names = [score.run for score in scores]
            value = sum((1 if pair else 100) * values[name][pair] for name in names) / len(names)
            cells.append(
                CellResult(
                    row,
                    column,
                    value,
                    value - 5,
                    value + 5,
                    len(names),
                    runs=names,
                    scores=scores,
                    task=task,
                    pair=pair,
                )
            )
    for seed in seeds:
        for label in ("math expert", "qac expert"):
            name = f"sft-{label.replace(' ', '-')}-s{seed}"
            runs[name] = RunResult(name, "sft", root / name, model="base-1", seconds=95.0)
    return results_of(
        cells,
        runs=runs.values(),
        contrasts=[
            line_of("layer swap", "base", "mgsm", 25.0, 0.001),
            line_of("soup", "base", "mgsm", 4.0, 0.4),
        ],
        table="sandbox",
        title="Layer swapping in the small world",
        note=(
            "A made-up language and a tiny model: the numbers show that the machinery works, no"
            " more."
        ),
        command="python -m pipeline stage=table table=sandbox",
        versions={
            "pipeline": "0.1.0",
            "torch": "2.13.0",
            "transformers": "5.23.0",
            "lm_eval": "0.4.13",
        },
        machine={"device": "cpu", "threads": 2, "cores": 2},
        git={"commit": "3fa9c1d2", "dirty": False},
    )


def line_of(
    left: str, right: str, place: str, difference: float, p: float | None, **more: Any
) -> dict[str, Any]:
    """Return a line of contrasts.csv."""
    values = {
        "left_value": 50.0,
        "right_value": 50.0 - difference,
        "low": difference - 5,
        "high": difference + 5,
    }
    known = {
        "over": "problems",
        "difference": difference,
        **values,
        "p": p,
        "n": 40,
        "detectable": 12.0,
        "detail": "",
        "missing": "",
        "exploratory": False,
    }
    return {"left": left, "right": right, "place": place, **known, **more}


def write_made_up(
    folder: Path, task: str, where: str, skill: float, n: int
) -> dict[str | None, float]:
    """Write made-up answers and return their scores by pair."""
    chance = random.Random(folder.name)
    rows, samples, values = [], {}, {}
    for pair in (f"en-{where}", f"{where}-en") if task == "flores" else (None,):
        lines = [made_up_sample(task, where, doc, skill, chance) for doc in range(n)]
        samples[f"{task}.{pair or where}"] = lines
        value = (
            10 + 60 * skill + chance.random()
            if pair
            else sum(bool(line["correct"]) for line in lines) / n
        )
        values[pair] = value
        rows.append(score(task, value, n, where, pair))
        other = {
            "mgsm": {"filter": "strict-match", "value": value / 2},
            "flores": {"metric": "bleu", "value": 3.2},
        }
        rows += [rows[-1] | other[task]] if task in other else []
    write_eval(folder, rows, samples)
    return values


def made_up_sample(
    task: str, where: str, doc: int, skill: float, chance: random.Random
) -> dict[str, Any]:
    if task == "mgsm":
        right = chance.random() < skill
        answer = 7 if right else chance.randint(8, 99)
        text = (
            f"Ana had {doc} loko and got {7 - doc}. {doc} + {7 - doc} = 7. The answer is {answer}"
        )
        prompt = f"Question: Ana mika {doc} loko, ta {7 - doc} so? ({where})\nAnswer:"
        return sample(doc, text, right, prompt=prompt)
    if task == "flores":
        return sample(doc, f"mika {where} ta {doc}", None, scores={"chrf++": chance.uniform(5, 60)})
    prompt = f"Passage {doc}. Which?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
    return sample(doc, chance.choice("ABCD"), chance.random() < skill, prompt=prompt, target="B")
