"""Evaluations that cannot run are found by the plan, and before a table's first training."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Call, Patch
from tiny_words import FEW

from pipeline.commands.plan import show_plan
from pipeline.commands.table import make_table
from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.launch.in_process import make_run
from pipeline.stages.rows import build

Command = Callable[..., Any]


@pytest.fixture
def mine(world: Path, base: Path, tmp_path: Path, monkeypatch: Patch) -> Command:
    """Return a table in three languages, of which the plain data_root has two."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("mgsm", "orca_math"):
        shutil.copytree(world / name, tmp_path / "data" / name)
    shutil.copytree(base, tmp_path / "base")
    for name in ("manifest.json", "world.json"):
        (tmp_path / "base" / name).unlink(missing_ok=True)
    table = {
        "name": "mine",
        "axes": {"language": ["en", "qac", "te"]},
        "every": {"data_root": "./data", "threads": 1, **dict(word.split("=") for word in FEW)},
        "runs": {
            "base": {"checkpoint": "./base"},
            "math": {"stage": "sft", "expert": "math", "model": "trained", "model.path": "./base"},
        },
        "score": {"eval": "mgsm_2shot", "in": "{language}", "eval.max_gen_toks": 4},
        "columns": {"base": "base", "math": "math"},
        "rows": {"{language}": {}},
    }

    def config(stage: str, *words: str, **changes: Any) -> Any:
        (tmp_path / "mine.yaml").write_text(json.dumps({**table, **changes}))
        return compose(
            [
                f"stage={stage}",
                "table=./mine.yaml",
                "runs_dir=./runs",
                "tracking.mode=disabled",
                *words,
            ]
        )

    return config


TWO = {"axes": {"language": ["en", "qac"]}}


def refused(function: Callable[[Any], Any], config: Any) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        function(config)
    return str(caught.value).split("\nerror: ")


@pytest.mark.parametrize("function", [show_plan, make_table])
def test_languages_without_data_are_grouped_by_cause(
    mine: Command, function: Any, tmp_path: Path
) -> None:
    stage = {show_plan: "plan", make_table: "table"}[function]
    (cause,) = refused(function, mine(stage, axes={"language": ["en", "te"]}))
    assert cause.startswith(
        "2 evaluations cannot run: data_root=data has no mgsm/te/test.jsonl. Put it there, "
    )
    assert cause.endswith(", ...)") and not list(tmp_path.glob("runs/math-*"))
    every_language = {"axes": {"language": ["te", "it", "th"]}}
    causes = refused(show_plan, mine("plan", **every_language))
    assert len(causes) == 3 and any(
        "data_root=data has no mgsm/it/test.jsonl" in one for one in causes
    )


def save_adapter(base: Path, folder: Path, named: str) -> Any:
    """Save PEFT's adapter with its base in the settings, and return PEFT's model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(len(folder.name))
    start = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(
        start, LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.requires_grad, alpha=2.0)
    model.peft_config["default"].base_model_name_or_path = named
    model.save_pretrained(folder)
    return model


def test_an_adapter_as_peft_saves_it_is_scored_on_a_base_that_is_here(
    mine: Command, tmp_path: Path
) -> None:
    """Without a tokenizer, its base named as on the Hub.

    Refused by the plan, before training, and by stage=eval, unless eval.base names a copy. Its
    answers are then those of the model that PEFT merges it into.
    """
    model = save_adapter(tmp_path / "base", tmp_path / "theirs", named="org/base")
    assert {path.name for path in (tmp_path / "theirs").glob("*.json")} == {"adapter_config.json"}
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "base" / name, tmp_path / "merged" / name)

    math = {"stage": "sft", "expert": "math", "model": "trained", "model.path": "./base"}
    theirs = {"runs": {"math": math, "theirs": {"checkpoint": "./theirs"}}}
    columns = {"math": {"run": "math"}, "theirs": {"run": "theirs"}}
    (cause,) = refused(show_plan, mine("plan", **TWO, **theirs, columns=columns))
    assert cause.startswith(
        "2 evaluations cannot run: The base model of adapter theirs cannot be loaded: hub:org/base"
    )
    assert "eval.base=FOLDER (for a merge merge.base=FOLDER, in a study base: FOLDER)" in cause
    for words in (theirs["runs"]["theirs"], columns["theirs"]):
        words["eval.base"] = "./base"
        text = show_plan(mine("plan", **TWO, **theirs, columns=columns))
        assert sum(map(int, re.findall(r"^scores(?: of merges)? +(\d+) ", text, re.MULTILINE))) == 4
        del words["eval.base"]

    def answers(*words: str) -> list[Any]:
        data = ["data_root=./data", "runs_dir=./runs", "languages=[qac]", "tracking.mode=disabled"]
        run = build(
            compose(["stage=eval", "eval=mgsm_2shot", "eval.max_gen_toks=12", *data, *words])
        )
        lines = (make_run(run) / "samples/mgsm.qac.jsonl").read_text().splitlines()
        return [json.loads(line)["response"] for line in lines]

    with pytest.raises(
        PipelineError, match=r"adapter theirs cannot be loaded: .* set eval.base=FOLDER"
    ):
        answers("checkpoint=./theirs")
    added = answers("checkpoint=./theirs", "eval.base=./base")
    assert added == answers("checkpoint=./merged") != answers("checkpoint=./base")
    for words in (["checkpoint=./base"], ["merge=soup", "merge.experts=[./base,./merged]"]):
        with pytest.raises(
            PipelineError,
            match=r"eval.base=./base is only read if checkpoint= is an adapter from else",
        ):
            answers(*words, "eval.base=./base")


@pytest.mark.parametrize(
    ("named", "problem"),
    [("org/base", "hub:org/base cannot be reached"), ("/gone/base", "is not here")],
)
def test_adapters_of_a_base_that_is_not_here_are_scored_on_that_of_a_study(
    named: str, problem: str, mine: Command, tmp_path: Path
) -> None:
    """The study names a copy as its base, which merges and scores take."""
    mine("plan")
    for name in ("math", "language"):
        save_adapter(tmp_path / "base", tmp_path / name, named)
    study = {
        "experts": {"math": "./math", "language": "./language"},
        "methods": ["soup"],
        "languages": ["en"],
        "benchmarks": ["mgsm_2shot"],
        "every": {"data_root": "./data"},
    }

    def planned(**base: str) -> Any:
        (tmp_path / "study.yaml").write_text(json.dumps(study | base))
        return compose(
            ["stage=plan", "table=./study.yaml", "runs_dir=./runs", "tracking.mode=disabled"]
        )

    causes = "".join(refused(show_plan, planned()))
    assert problem in causes and "a study base: FOLDER" in causes, causes
    assert "scores" in show_plan(planned(base="./base"))


def test_copies_and_rows_with_blanks_are_no_rows_of_it(
    mine: Command, tmp_path: Path, call: Call
) -> None:
    """Nine of the fifteen rows are left."""
    rows = [f"How much is {n} and {n}?,{2 * n}" for n in range(9)]
    (tmp_path / "own.csv").write_text(
        "\n".join(["q,a", *rows, *rows[:4], "What now?,", ",7"]) + "\n"
    )
    words = [
        "model=./base",
        "recipe=sandbox_math",
        "expert=own",
        "expert.sources.own.url=own.csv",
        "expert.sources.own.prompt='{q}'",
        "expert.sources.own.completion='{a}'",
        "sft.batch_size=4",
        "sft.micro_batch_size=4",
        "sft.steps=3",
        "runs_dir=./runs",
        "tracking.mode=disabled",
    ]
    told = call("stage=sft", *words)
    assert (
        told.status == 1
        and "sft.steps=3 with sft.batch_size=4 needs more rows than 9 in each" in told.err
    )
