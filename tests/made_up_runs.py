"""Finished runs as a report reads them, made up: manifests, logs, scores and answers, without computing anything."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.benchmarks import primary_metric
from pipeline.files import fingerprints
from pipeline.runs.manifest import MANIFEST, Ancestor, Manifest
from pipeline.runs.run import Run
from pipeline.runs.unchanged import content_digest


def finish(runs: list[Run], answers: int = 100, **made: Any) -> None:
    """Write these runs, parents first, as if they had been made: what a report reads, and nothing else.

    made: fields of the manifests in place of these here, such as machine={"device": "cpu", "threads": 1}.
    """
    for run in runs:
        (run.folder / MANIFEST).unlink(missing_ok=True)
        if run.config.stage == "eval":
            score(run, answers)
        elif run.config.stage == "data":
            write(run.folder / "data_card.md", "# A made-up set\n")
        elif run.config.stage in ("sft", "cpt"):
            log = ({"step": step, "loss": 1 + 1 / step, "validation_loss": 1.1 + 1 / step} for step in range(1, 200))
            write(run.folder / "log.jsonl", "".join(json.dumps(line) + "\n" for line in log))
        parents = {role: Ancestor(one.name, one.hash, content_digest(one)) for role, one in run.parents.items()}
        known = {"facts": {}, "cost": {"seconds": 1.5}, "versions": VERSIONS, "machine": MACHINE, **made}
        manifest = Manifest(
            name=run.name, hash=run.hash, decided_by=run.decided_by, config=asdict(run.config), parents=parents,
            files=fingerprints(run.folder), **known,
        )  # fmt: skip
        manifest.write(run.folder)


VERSIONS, MACHINE = {"torch": "2.13.0", "lm-eval": "0.4.13"}, {"device": "cpu", "threads": 2}


def score(run: Run, answers: int) -> None:
    """Scores and answers of one task in one language, of translations both ways."""
    task, language = run.config.eval.tasks[0], run.config.languages[0]
    metric, chosen = primary_metric(task.task)
    chance = random.Random(run.hash)
    skill, rows = 0.3 + 0.4 * chance.random(), []
    for pair in (f"en-{language}", f"{language}-en") if task.task == "flores" else (None,):
        right = [chance.random() < skill for _ in range(answers)]
        lines = [answer(doc, one, task.task, metric, chosen) for doc, one in enumerate(right)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write(run.folder / "samples" / f"{task.task}.{pair or language}.jsonl", text)
        value = sum(right) / answers
        row = {
            "task": task.task, "language": language, "pair": pair, "subject": None, "num_fewshot": task.num_fewshot,
            "metric": metric, "filter": chosen, "value": 100 * value if pair else value,
            "stderr": None if pair else (value * (1 - value) / answers) ** 0.5, "n": answers,
        }  # fmt: skip
        rows += [row, *({**row, "metric": name, "value": value} for name in ("unparsed", "cut_off", "numeric_match"))]
        rows += [{**row, "filter": "strict-match"}, {**row, "metric": "unparsed", "filter": "last-number"}]
    write(run.folder / "scores.json", json.dumps({"rows": rows, "beside": [], "harness": {"backend": "hf"}}))


def answer(doc: int, right: bool, task: str, metric: str, chosen: str) -> dict[str, Any]:
    reply = f"She had {doc} and got {doc + 3}, so that {doc} + {doc + 3} = {2 * doc + 3}. " * 3
    return {
        "doc_id": doc, "prompt": f"Question {doc}: how many does she have in all?\nAnswer:" * 4, "target": "7",
        "response": f"{reply} The answer is {7 if right else 8}", "extracted": "7" if right else "8",
        "correct": None if task == "flores" else right, "cut_off": False, "filter": chosen, "prompt_hash": "0" * 64,
        "scores": {metric: 100.0 * right if task == "flores" else float(right)},
    }  # fmt: skip


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
