"""Finished runs as a report reads them, made up.

Manifests, logs, scores and answers, without computing anything.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.benchmarks import benchmark_of, primary_metric
from pipeline.files import fingerprints
from pipeline.runs.manifest import MANIFEST, Ancestor, Manifest
from pipeline.runs.run import Run
from pipeline.runs.unchanged import content_digest

VERSIONS, MACHINE = {"torch": "2.13.0", "lm-eval": "0.4.13"}, {"device": "cpu", "threads": 2}
MAPPED = ("attention.wq", "feed_forward.w1")  # columns of a map


def finish(
    runs: Sequence[Run],
    answers: int = 100,
    rates: Mapping[str, float] | None = None,
    steps: int = 199,
    **made: Any,
) -> None:
    """Write these runs as if they were finished, parents first, for a report.

    rates: run hash -> score, which the answers approach as closely as possible. Without a rate,
    answers are drawn by the hash. steps: steps of a training's log. made: fields that replace the
    manifests' fields, such as machine={"device": "cpu", "threads": 1}.
    """
    folders = [
        run.folder for run in runs
    ]  # looked up before anything is written: each look reads all of runs_dir
    contents: dict[str, str | None] = {}
    for run, folder in zip(runs, folders, strict=True):
        (folder / MANIFEST).unlink(missing_ok=True)
        stage = run.config.stage
        if stage == "eval":
            score(run, folder, answers, (rates or {}).get(run.hash))
        elif stage == "data":
            write(folder / "data_card.md", "# A made-up set\n")
        elif stage in ("sft", "cpt"):
            losses = ((step, 1 / (step + 1)) for step in range(steps))
            log = (
                {"step": step, "loss": 1 + more, "validation_loss": 1.1 + more}
                for step, more in losses
            )
            write(folder / "log.jsonl", lines_of(log))
        elif stage == "analyze":
            write(folder / "map.svg", "<svg></svg>")
            rows = (f"e,{layer},{kind},0.01,0.5\n" for layer in range(32) for kind in MAPPED)
            write(folder / "delta.csv", "expert,layer,column,relative,share\n" + "".join(rows))
        parents = {
            role: Ancestor(
                one.name,
                one.hash,
                contents[one.hash] if one.hash in contents else content_digest(one),
            )
            for role, one in run.parents.items()
        }
        known = {
            "facts": {},
            "cost": {"seconds": 1.5},
            "versions": VERSIONS,
            "machine": MACHINE,
            **made,
        }
        folder.mkdir(parents=True, exist_ok=True)
        manifest = Manifest(
            name=folder.name,
            hash=run.hash,
            decided_by=run.decided_by,
            config=asdict(run.config),
            parents=parents,
            files=fingerprints(folder),
            **known,
        )
        manifest.write(folder)
        contents[run.hash] = manifest.content


def score(run: Run, folder: Path, answers: int, rate: float | None) -> None:
    """Scores and answers of one task in one language, of translations both ways.

    Measures such as bits are noise.
    """
    task, language = run.config.eval.tasks[0], run.config.languages[0]
    (metric, chosen), measures = primary_metric(task.task), benchmark_of(task.task).measures
    chance, rows = random.Random(run.hash), []
    skill = 0.3 + 0.4 * chance.random()
    for pair in (f"en-{language}", f"{language}-en") if task.task == "flores" else (None,):
        if rate is None:
            right = [chance.random() < skill for _ in range(answers)]
        else:
            right = [number < round(rate * answers) for number in range(answers)]
            chance.shuffle(right)
        value = sum(right) / answers if rate is None else rate
        lines = [answer(doc, one, task.task, metric, chosen) for doc, one in enumerate(right)]
        row = {
            "task": task.task,
            "language": language,
            "pair": pair,
            "subject": None,
            "num_fewshot": task.num_fewshot,
            "metric": metric,
            "filter": chosen,
            "value": 100 * value if pair else value,
            "stderr": None if pair else (value * (1 - value) / answers) ** 0.5,
            "n": answers,
        }
        for measure in measures:
            for line in lines:
                line["scores"] = {**line["scores"], measure: chance.gauss(-20, 4)}
            mean = sum(line["scores"][measure] for line in lines) / answers
            rows.append({**row, "metric": measure, "filter": "none", "value": mean})
        rows += [] if metric in measures else [row]
        shares = ["unparsed", "cut_off", "numeric_match"]
        if run.config.eval.think_end is not None:
            shares.append("thinking_other_language")
        rows += [*({**row, "metric": name, "value": value} for name in shares)]
        rows += [
            {**row, "filter": "strict-match"},
            {**row, "metric": "unparsed", "filter": "last-number"},
        ]
        rows += [
            *({**row, "metric": name, "filter": "none"} for name in ("bleu", "spbleu") if pair)
        ]
        write(folder / "samples" / f"{task.task}.{pair or language}.jsonl", lines_of(lines))
    write(
        folder / "scores.json",
        json.dumps({"rows": rows, "beside": [], "harness": {"backend": "hf"}}),
    )


def answer(doc: int, right: bool, task: str, metric: str, chosen: str) -> dict[str, Any]:
    reply = f"She had {doc} and got {doc + 3}, so that {doc} + {doc + 3} = {2 * doc + 3}. " * 3
    return {
        "doc_id": doc,
        "group": str(doc),
        "target": "7",
        "prompt": f"Question {doc}: how many does she have in all?\nAnswer:" * 4,
        "response": f"{reply} The answer is {7 if right else 8}",
        "extracted": "7" if right else "8",
        "correct": None if task == "flores" else right,
        "cut_off": False,
        "filter": chosen,
        "prompt_hash": "0" * 64,
        "scores": {metric: 100.0 * right if task == "flores" else float(right)},
    }


def lines_of(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
