"""The commands as functions: the runs, pages and numbers of the command line, by the same words."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Call, Patch
from tiny_words import FEW

from pipeline.api import evaluate, merge, report, spelled, table, train
from pipeline.config.compose import compose
from pipeline.config.stages import Launcher
from pipeline.errors import PipelineError


def test_functions_give_the_same(
    world: Path, base: Path, tmp_path: Path, call: Call, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    shared = {"runs_dir": tmp_path / "runs", "tracking": {"mode": "disabled"}}
    few = {
        key: json.loads(value) if value != "fp32" else value
        for key, value in (w.split("=") for w in FEW)
    }
    start = {"model": base, "data_root": world, **shared, **few}
    math = train("math", recipe="sandbox_math", **start)
    qac = train(
        "qac",
        recipe="sandbox_language",
        seq_length=96,
        **{k: v for k, v in start.items() if "seq" not in k},
    )
    swap = merge("layer_swap", math=math, language=qac, scale_to_depth=True, **shared)
    words = {
        "eval": "mgsm_2shot",
        "languages": ["qac"],
        "limit": 2,
        "data_root": world,
        "max_gen_toks": 12,
        **shared,
    }
    scores = evaluate(checkpoint=swap, **words)
    live = {"merge.math": math, "merge.language": qac, "merge.scale_to_depth": True}
    assert scores.attrs["folder"].parent == tmp_path / "runs" and set(scores.run) == {
        scores.attrs["folder"].name
    }
    rows = json.loads((scores.attrs["folder"] / "scores.json").read_text())["rows"]
    assert scores.value.tolist()[: len(rows)] == [
        100 * row["value"] for row in rows
    ]  # as those of a table
    named = {"math": math, "language": qac, "scale_to_depth": True}
    assert evaluate(merge="layer_swap", **named, **words).value.tolist() == scores.value.tolist()
    assert evaluate(merge="layer_swap", **live, **words).value.tolist() == scores.value.tolist()

    common = [f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]
    made = [f"model={base}", f"data_root={world}", *common, *FEW]
    same = call("stage=sft", "expert=math", "recipe=sandbox_math", *made)
    assert Path(same.out.strip()) == math and "was finished before" in same.err
    again = call(
        "stage=merge",
        "merge=layer_swap",
        f"merge.math={math}",
        f"merge.language={qac}",
        "merge.scale_to_depth=true",
        *common,
    )
    assert Path(again.out.strip()) == swap


def test_a_table_gives_its_page_and_frames(world: Path, base: Path, tmp_path: Path) -> None:
    study = {
        "name": "own",
        "every": {"data_root": str(world), "eval.limit": 4},
        "runs": {"base": {"checkpoint": str(base)}},
        "score": {"eval": "mgsm_2shot", "eval.max_gen_toks": 12},
        "columns": {"qac": {"task": "mgsm", "in": "qac"}},
        "rows": {"base": {"run": "base"}},
    }
    (tmp_path / "own.yaml").write_text(json.dumps(study))
    shared = {"runs_dir": tmp_path / "runs", "tracking": {"mode": "disabled"}}
    made = table(tmp_path / "own.yaml", every={"eval.limit": 2}, launcher={"workers": 1}, **shared)
    assert made.page.is_file() and len(made.answers) == 2 and set(made.scores.row) == {"base"}
    state = made.page.with_name("report.json").read_bytes()
    jobs = {"launcher": "slurm", "launcher.gpus": 0, "launcher.dry_run": True, "threads": 1}
    with pytest.raises(SystemExit):  # writes scripts, and no more
        table(tmp_path / "own.yaml", every={"eval.limit": 3}, **jobs, **shared)
    assert made.page.with_name("report.json").read_bytes() == state
    shown = report(tmp_path / "own.yaml", every={"eval.limit": 2}, **shared)
    assert shown.page == made.page and shown.scores.equals(made.scores)


def test_keywords_are_the_words_of_the_command() -> None:
    words = {
        "expert": "sw",
        "sft": "lora",
        "learning_rate": 6e-5,
        "data": {"size": 9},
        "seed": 1,
        "model": Path("./b"),
    }
    assert spelled("sft", "sft", words) == {
        "expert": "sw",
        "sft": "lora",
        "sft.learning_rate": 6e-5,
        "data.size": 9,
        "seed": 1,
        "model": "./b",
    }
    weights = {"merge": "soup", "experts": [Path("/a"), "b"], "weights": [0.3, 0.7]}
    assert spelled("merge", "merge", weights) == {
        "merge": "soup",
        "merge.experts": ["/a", "b"],
        "merge.weights": [0.3, 0.7],
    }
    with pytest.raises(PipelineError, match=r"sft.learning_rat.*sft.learning_rate"):
        train("math", learning_rat=1e-5)
    with pytest.raises(
        PipelineError, match="stage=sft: data.size is given twice, nested and with a dot"
    ):
        train("math", data={"size": 9}, **{"data.size": 8})
    with pytest.raises(PipelineError, match="methd"):
        merge("layer_swap", methd="x")
    with pytest.raises(PipelineError, match="evry"):
        table("sandbox", evry={"seed": 1})
    with pytest.raises(PipelineError, match="evry"):
        table("sandbox", evry={})


def test_an_option_that_was_changed_between_two_calls_is_read_again(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """As in a notebook, which is one process for many calls."""
    rates: list[float] = []

    def told(config: Any, options: Any) -> str:
        rates.append(config.sft.learning_rate)
        return str(tmp_path)

    monkeypatch.setattr("pipeline.api.stage_output", told)
    (tmp_path / "recipe").mkdir()
    for rate in ("3.0e-6", "5.0e-6"):
        (tmp_path / "recipe/mine.yaml").write_text(f"# @package sft\nlearning_rate: {rate}\n")
        train(expert="math", recipe="mine", config_dir=str(tmp_path))
    assert rates == [3e-6, 5e-6]


def test_the_job_that_continues_a_table_has_the_keywords_of_the_call(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Not the arguments of the program that called."""
    monkeypatch.setattr(sys, "argv", ["notebook", "-f", "kernel.json"])
    launcher = {"dry_run": True, "gpus": 0, "options": ["--comment=it's"]}
    runs_dir = tmp_path / "my runs"
    with pytest.raises(SystemExit):
        table(
            "sandbox",
            launcher="slurm",
            runs_dir=runs_dir,
            every={"seed": 1},
            **{f"launcher.{key}": value for key, value in launcher.items()},
        )
    lines = [
        line
        for file in (runs_dir / ".slurm-dry-run").rglob("*.sh")
        for line in file.read_text().splitlines()
    ]
    (words,) = [
        shlex.split(line) for line in lines if "pipeline" in line and "table=sandbox" in line
    ]
    command = words[words.index("pipeline") + 1 : words.index("&")]
    again: Any = compose([*command, "launcher.dry_run=true"])
    assert (again.table, again.runs_dir, again.every) == ("sandbox", str(runs_dir), {"seed": 1})
    assert again.launcher == Launcher(name="slurm", **launcher)
