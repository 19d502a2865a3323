"""Tables as runs.

Every shipped table plans, its runs are those of the command line, and knobs mean what they say.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fixture_types import Patch

from pipeline.benchmarks import lower_is_better
from pipeline.commands.plan import show_plan
from pipeline.config.compose import compose
from pipeline.config.evaluation import Eval, EvalTask
from pipeline.config.harness_tasks import task_of_option
from pipeline.errors import PipelineError
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.files import ADDED_CONF
from pipeline.report.compare import headline_sentences
from pipeline.report.contrasts import measure_pairs
from pipeline.report.expression import evaluate
from pipeline.report.metrics import stored_metric
from pipeline.report.stored import StoredAnswers
from pipeline.runs.graph import order_runs
from pipeline.stages.evaluation import refuse_lower
from pipeline.stages.rows import build
from pipeline.tables.plan import Candidate
from pipeline.tables.planned_runs import Planning, score_rows


def planning(tmp_path: Path, *words: str) -> Planning:
    return Planning.of(compose(["stage=plan", f"runs_dir={tmp_path}/runs", *words]))  # type: ignore[arg-type]


def test_a_score_is_the_run_of_the_same_command(tmp_path: Path) -> None:
    """One task of the bundle, one language, the longest answer of that language.

    Its hash is that of stage=eval.
    """
    found = planning(tmp_path, "table=unreasonable_table_a8")
    runs = {
        (run.config.eval.tasks[0].task, run.config.languages[0]): run for run in found.targets()
    }  # type: ignore[attr-defined]
    for language, room in (("te", ["eval.max_gen_toks=1024"]), ("sw", [])):
        model = next(iter(runs["mgsm", language].parents.values()))
        asked = [
            "stage=eval",
            "eval=mgsm_2shot",
            f"languages=[{language}]",
            "eval.dtype=float32",
            *room,
        ]
        config = compose([*asked, f"checkpoint=hub:{model.hub}", f"runs_dir={tmp_path}/runs"])  # type: ignore[attr-defined]
        assert build(config).hash == runs["mgsm", language].hash  # type: ignore[arg-type]


def test_every_from_the_command_line_goes_to_the_runs_that_read_it(tmp_path: Path) -> None:
    plain, more = (
        {
            run.label: run
            for run in order_runs(planning(tmp_path, "table=sandbox", *words).targets())
        }
        for words in ([], ["every.sft.max_grad_norm=0.5"])
    )
    changed = {label for label in plain if plain[label].hash != more[label].hash}
    assert changed >= {"math-full-s0", "qac-partial-B-s0"} and not any(
        label.startswith("data-") for label in changed
    )
    base = {label for label in plain if "sandbox_base" in label}
    assert base and not base & changed  # the base is scored as before


def test_a_table_whose_trainings_cannot_be_planned_is_still_shown(tmp_path: Path) -> None:
    """Five processes do not divide the recipes' batches.

    What is trained has no run to count questions of.
    """
    config = compose(
        [
            "stage=plan",
            "table=layer_swapping_table1",
            f"runs_dir={tmp_path}",
            "every.sft.processes=5",
        ]
    )
    with pytest.raises(PipelineError, match="^cannot be planned: sft.batch_size=") as refused:
        show_plan(config)  # type: ignore[arg-type]
    assert (
        " runs and cells need these" in str(refused.value)
        and "Next: fix it" in refused.value.output
    )
    found = Planning.of(config)  # type: ignore[arg-type]
    unplanned = [score for score in found.plan.scores if found.evaluation_of(score) is None]
    output = " ".join(refused.value.output.split())
    assert f"{len(unplanned):,} of 1,108 scores, which cannot be planned" in output
    assert 0 < len(unplanned) < 1108


@pytest.fixture
def own(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Return an expert of 40 rows in CSV, in a folder of options, and a data_root."""
    monkeypatch.setenv(ADDED_CONF, str(tmp_path / "conf"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "conf/expert").mkdir(parents=True)
    (tmp_path / "conf/expert/mine.yaml").write_text(
        "name: mine\nside: math\nsources: {own: {file: rows.csv, rows: template, prompt: '{q}',"
        " completion: '{a}'}}\n"
    )
    rows = [f'"Question {number},\nin two lines?",{number}' for number in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["q,a", *rows]) + "\n")
    return tmp_path


def test_a_single_command_is_planned(own: Path) -> None:
    """What it takes first and last, of the stage that its groups name, or plan.stage."""
    words = [
        "expert=mine",
        "model=sandbox",
        "recipe=sandbox_math",
        f"data_root={own}",
        f"runs_dir={own}/r",
    ]
    lines = show_plan(compose(["stage=plan", *words, "sft.steps=1", "plan.lines=9"])).splitlines()  # type: ignore[arg-type]
    assert lines[0] == "stage=sft: mine-full-s0 (recipe=sandbox_math)"
    assert re.fullmatch(r"2 runs, 0 done\. About \d+ s on this machine\.", lines[1])
    assert any(line.startswith("trainings: full; 32 rows in 1 steps of 32, ") for line in lines), (
        lines
    )
    run = build(compose(["stage=sft", *words, "sft.steps=1"]))  # type: ignore[arg-type]
    assert any(line.startswith(run.name) for line in lines)
    fetched = compose(["stage=prefetch", *words])
    assert fetched.runs_dir == f"{own}/r" and fetched.command == ["stage=sft", *words]  # type: ignore[attr-defined]
    data = show_plan(compose(["stage=plan", "plan.stage=data", *words[:1], *words[3:]]))  # type: ignore[arg-type]
    assert data.startswith("stage=data: data-mine\n") and "1 run, 0 done." in data
    assert not (own / "r").exists()
    with pytest.raises(PipelineError, match="unknown key sft.stops: did you mean sft.steps"):
        show_plan(compose(["stage=plan", *words, "sft.stops=3"]))  # type: ignore[arg-type]


def test_what_a_choice_names_is_planned_once_it_is_made(tmp_path: Path, monkeypatch: Patch) -> None:
    found = planning(tmp_path, "table=sandbox")
    assert len(found.waiting_scores()) == 28  # of the chosen merges and of their controls
    numbers = {
        score: float("counts=3+0" in score.model or "density=0.5" in score.model)
        for score in found.plan.scores
    }
    monkeypatch.setattr(found, "primary_number", numbers.__getitem__)
    winners: set[Candidate | None] = {found.chosen_candidate(key) for key in found.plan.choices}
    assert winners == {("3+0",), (0.5,)} and not found.waiting_scores()
    chosen = [run for run in found.targets() if run.config.chosen_by]  # type: ignore[attr-defined]
    assert len(chosen) == 28
    assert {getattr(run.config.merge, "bottom_layers", None) for run in chosen} == {3, None}  # type: ignore[attr-defined]


PERPLEXITY = """
name: mine
axes: {counts: {1+0: {bottom: 1}, 2+0: {bottom: 2}, 3+0: {bottom: 3}}}
every: {model: sandbox}
runs:
  a: {stage: sft, expert: math, recipe: sandbox_math}
  b: {stage: sft, expert: qac, recipe: sandbox_language}
  swap: {merge: layer_swap, merge.math: a, merge.language: b, merge.bottom_layers: "{counts.bottom}"}
score: {eval: wikitext, in: en}
rows: {swap: {run: swap, best: [counts]}}
columns: {all: {}}
"""


def test_the_best_of_a_perplexity_is_the_least(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "mine.yaml").write_text(PERPLEXITY)
    found = planning(tmp_path, f"table={tmp_path}/mine.yaml", f"data_root={tmp_path}")
    (choice,) = found.plan.choices.values()
    numbers = {
        score: value
        for (score,), value in zip(choice.candidates.values(), [4.8, 4.2, 4.5], strict=True)
    }
    monkeypatch.setattr(found, "primary_number", numbers.__getitem__)
    assert found.chosen_candidate(choice.key) == ("2+0",)

    def number(score: Any) -> np.ndarray:
        return np.array([numbers[score]])

    assert evaluate(found.plan, found.plan.cells["swap", "all"], number, number) == 4.2
    assert (
        lower_is_better("wikitext")
        and lower_is_better("crows_pairs_english")
        and not lower_is_better("arc_easy")
    )
    assert (
        percent_factor("bits_per_byte") == percent_factor("word_perplexity") == 1
        and percent_factor("acc") == 100
    )
    # crows_pairs' differences are in nats; of TruthfulQA's answers bleu_acc counts those nearer to
    # a right one
    assert (
        percent_factor("likelihood_diff") == percent_factor("bleu_max") == 1
        and percent_factor("bleu_acc") == 100
    )
    with pytest.raises(
        PipelineError, match="wikitext: lower bits_per_byte is better, but a selection takes"
    ):
        refuse_lower("wikitext", "a selection takes")


def test_the_better_of_two_is_the_lower_where_less_is_better(tmp_path: Path) -> None:
    rows = "rows: {one: {run: swap, counts: 1+0}, two: {run: swap, counts: 2+0}}"
    text = PERPLEXITY.replace("rows: {swap: {run: swap, best: [counts]}}", rows)
    for task, verb in (("crows_pairs_english", "worse"), ("arc_easy", "better")):
        (tmp_path / "mine.yaml").write_text(text.replace("wikitext", task))
        plan = planning(tmp_path, f"table={tmp_path}/mine.yaml", f"data_root={tmp_path}").plan
        high = plan.cells["one", "all"].items[0].readings[0][()]

        class Stored(StoredAnswers):
            def scores_by_question(
                self, score: Any, metric: str, pair: str | None, high: Any = high
            ) -> Any:
                return {
                    at: float((at % 9 > 0) if score == high else (at % 9 == 0)) for at in range(90)
                }

        nothing: Any = None
        lines = measure_pairs(plan, Stored(nothing), {("one", "two", "all"): 1})
        assert headline_sentences(lines)[0].startswith(
            f"“one” is {verb} than “two” in “all”: +77.8 points (95 % CI +"
        )
        assert lines[0]["lower_is_better"] == (verb == "worse")


def test_the_task_of_an_option_is_that_of_its_file(tmp_path: Path, monkeypatch: Patch) -> None:
    """Whatever it is called: intervals and comparisons are of the task's answers."""
    (tmp_path / "conf/eval").mkdir(parents=True)
    (tmp_path / "conf/eval/hard.yaml").write_text(
        "name: hard\ntasks:\n  - {task: mgsm, num_fewshot: 4}\n"
    )
    monkeypatch.setenv(ADDED_CONF, str(tmp_path / "conf"))
    assert [task_of_option(name) for name in ("hard", "mgsm_2shot", "xcopa", "arc_easy_5shot")] == [
        "mgsm",
        "mgsm",
        "xcopa",
        "arc_easy",
    ]
    (tmp_path / "mine.yaml").write_text(PERPLEXITY.replace("wikitext", "hard"))
    plan = planning(tmp_path, f"table={tmp_path}/mine.yaml").plan
    assert stored_metric(plan, [plan.cells["swap", "all"]]) == "exact_match"


def test_a_metric_of_several_filters_is_that_of_the_primary_one(tmp_path: Path) -> None:
    """Not their mean: MGSM's `unparsed` is of flexible-extract and of the last number."""
    row: dict[str, Any] = {
        "task": "mgsm",
        "language": "en",
        "pair": None,
        "subject": None,
        "num_fewshot": 0,
    }
    row |= {"stderr": None, "n": 9}
    of_filters = {
        "flexible-extract": ["exact_match", "unparsed"],
        "strict-match": ["exact_match"],
        "last-number": ["unparsed", "numeric_match"],
    }
    rows = [
        row | {"metric": metric, "filter": name, "value": len(name) / 100}
        for name, metrics in of_filters.items()
        for metric in metrics
    ]
    (tmp_path / "scores.json").write_text(json.dumps({"rows": rows}))
    run: Any = SimpleNamespace(
        folder=tmp_path, config=SimpleNamespace(eval=Eval(tasks=[EvalTask("mgsm", 0)]))
    )
    found = {
        metric: [one.filter for one in score_rows(run, metric)]
        for metric in ("unparsed", "numeric_match", None)
    }
    assert found == {
        "unparsed": ["flexible-extract"],
        "numeric_match": ["last-number"],
        None: ["flexible-extract"],
    }
