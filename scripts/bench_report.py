"""What a report costs: CPU seconds of stage=report, of stage=export, and of unpacking the archive, imports and all;
bytes of the page, and milliseconds until it is interactive in headless Chromium (medians of five).

Plans a table of the small world whose evaluations are many (24 models in three languages, fifteen seeds), writes
made-up manifests, scores and answers of all its runs, and reports it: about 2,000 evaluations of 100 answers each,
12,000 lines of results.csv, 10,000 answers on the page. The browser needs Debian's chromium and chromium-driver, and
selenium.

    python scripts/bench_report.py                    # prints the table
    python scripts/bench_report.py --record results/bench/report.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from shutil import which
from typing import Any

from pipeline.benchmarks import primary_metric
from pipeline.config.compose import compose
from pipeline.files import fingerprints
from pipeline.runs.graph import order_runs
from pipeline.runs.manifest import MANIFEST, Ancestor, Manifest
from pipeline.runs.provenance import machine_facts, package_versions
from pipeline.runs.run import Run
from pipeline.runs.unchanged import content_digest
from pipeline.tables.planned_runs import Planning

GOAL = 10.0  # CPU seconds of stage=report
TABLE = """
name: many
title: Many merges
axes:
  language: [qaa, qab, qac]
  seed: [{seeds}]
  b: [1, 2, 3, 4, 5, 6]
  u: [0, 1]
  density: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
every: {{model: sandbox, data_root: world}}
runs:
  world: {{stage: data, expert: sandbox}}
  base: {{}}
  math expert: {{stage: sft, expert: math, recipe: sandbox_math, seed: "{{seed}}"}}
  language expert: {{stage: sft, expert: "{{language}}", recipe: sandbox_language, seed: "{{seed}}"}}
  swap: {{merge: layer_swap, merge.math: math expert, merge.language: language expert, merge.bottom_layers: "{{b}}",
    merge.top_layers: "{{u}}"}}
  soup: {{merge: soup, merge.experts: [math expert, language expert]}}
  TIES: {{merge: ties, merge.experts: [math expert, language expert], merge.density: "{{density}}"}}
score: {{eval: mgsm_0shot, eval.max_gen_toks: 40, mean: [seed]}}
columns:
  "{{language}}: mgsm": {{in: "{{language}}"}}
  "{{language}}: mgsm en": {{in: en}}
rows:
  base: {{run: base}}
  math expert: {{run: math expert}}
  language expert: {{run: language expert}}
  "layer swap {{b}}+{{u}}": {{run: swap}}
  soup: {{run: soup}}
  "TIES {{density}}": {{run: TIES}}
"""


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


def cpu_seconds(words: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pipeline", *words]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=one_thread, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-500:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


INTERACTIVE = """
const done = arguments[arguments.length - 1];
const [load] = performance.getEntriesByType("navigation");
const [paint] = performance.getEntriesByName("first-contentful-paint");
const start = performance.now(), interactive = Math.max(load.loadEventEnd, paint.startTime + paint.duration);
document.getElementById("answers").closest("details").open = true;
const shown = () => document.querySelector("#list tbody tr") ? done({interactive, answers: performance.now() - start})
  : requestAnimationFrame(shown);
requestAnimationFrame(shown);
"""


def browser_milliseconds(page: Path, rounds: int = 5) -> dict[str, Any]:
    """Medians in headless Chromium: milliseconds from opening the page until it has been painted and all of its script
    has run (`interactive`), and from opening its answers until they are there (`answers`)."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(word)
    options.binary_location = which("chromium")
    driver = webdriver.Chrome(options=options, service=Service(which("chromedriver")))
    try:
        timings = []
        for _ in range(rounds):
            driver.get("about:blank")
            driver.get(page.absolute().as_uri())
            timings.append(driver.execute_async_script(INTERACTIVE))
        return {"chromium": driver.capabilities["browserVersion"]} | {
            f"{name}_ms": round(statistics.median(timing[name] for timing in timings)) for name in timings[0]
        }
    finally:
        driver.quit()


def page_facts(page: Path) -> dict[str, Any]:
    """Bytes of a page, the answers in it, and its times in the browser."""
    text = page.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    answers = sum(map(len, json.loads(data)["models"].values()))
    return {"page_bytes": page.stat().st_size, "page_answers": answers, **browser_milliseconds(page)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="the least of so many runs stands")
    parser.add_argument("--seeds", type=int, default=15)
    parser.add_argument("--keep", type=Path, help="make everything in this folder, and leave it")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = options.keep or Path(temporary)
        home.mkdir(parents=True, exist_ok=True)
        table, archive = home / "many.yaml", home / "many.zip"
        table.write_text(TABLE.format(seeds=", ".join(map(str, range(options.seeds)))), encoding="utf-8")
        words = [f"table={table}", f"runs_dir={home / 'runs'}", "tracking.mode=disabled"]
        planning = Planning.of(compose(["stage=report", *words]))  # type: ignore[arg-type]
        finish(order_runs(planning.targets()))
        commands = {
            "stage=report": ["stage=report", *words],
            "stage=export": ["stage=export", *words, f"export.to={archive}"],
            "stage=report of the archive": [
                "stage=report",
                f"table={archive}",
                f"runs_dir={home / 'elsewhere'}",
                words[-1],
            ],
        }
        load = os.getloadavg()
        rows = []
        for name, command in commands.items():
            seconds = min(cpu_seconds(command) for _ in range(options.rounds))
            rows.append(
                {"command": name, "cpu_seconds": round(seconds, 2), "goal": GOAL if name[6:] == "report" else None}
            )
            print(rows[-1], flush=True)
        report = home / "runs/reports/many"
        results = len((report / "results.csv").read_text(encoding="utf-8").splitlines()) - 1
        evaluations = sum(1 for _ in (home / "runs").glob("eval-*"))
        page = page_facts(report / "index.html")
    about = {"results": results, "evaluations": evaluations, "answers_each": 100, **page}
    print(about)
    if options.record:
        record = {
            "machine": machine_facts(),
            "versions": package_versions(),
            "load": load,
            "rounds": options.rounds,
            **about,
        }
        options.record.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
