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
from pipeline.estimate import training_rows
from pipeline.evaluate import prompts
from pipeline.launch.in_process import make_run
from pipeline.launch.preflight import LENGTHS
from pipeline.runs.graph import order_runs
from pipeline.stages.lengths import read_rows
from pipeline.stages.rows import build
from pipeline.tables.planned_runs import Planning

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


def test_a_matrix_that_the_base_does_not_have_is_refused_by_the_plan(mine: Command) -> None:
    math = {
        "stage": "sft",
        "expert": "math",
        "model": "trained",
        "model.path": "./base",
        "sft": "lora",
    }
    runs = {"math": math | {"sft.lora_targets": ["q_proj", "query_key_value"]}}
    causes = refused(show_plan, mine("plan", runs=runs, columns={"math": {"run": "math"}}))
    expected = "sft.lora_targets: query_key_value matches no matrix. Choose from down_proj, gate_proj, k_proj"
    assert sum(cause.startswith(expected) for cause in causes) == 1, causes


def test_rows_that_are_cut_are_counted_by_the_plan(mine: Command, tmp_path: Path) -> None:
    """Rows that lose their response are counted in files and in a data run's rows."""
    from transformers import AutoTokenizer

    assert "truncates" not in show_plan(mine("plan", **TWO))
    config = mine("plan", "plan.lines=9", "every.sft.seq_length=40", **TWO)
    told = re.search(
        r"sft.seq_length=40 truncates (\d+) of the first (\d+) rows of data-math-\w+, (\d+) of them"
        r" before any",
        show_plan(config),
    )
    assert told and int(told[1]) > 0
    data = next(
        run for run in order_runs(Planning.of(config).targets()) if run.config.stage == "data"
    )
    rows = [json.loads(line) for line in (make_run(data) / "train.jsonl").read_text().splitlines()]
    assert int(told[2]) == len(rows) == 40
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    ids = [
        tokenizer(row["prompt"] + "\n" + row["completion"] + tokenizer.eos_token).input_ids
        for row in rows
    ]
    prompts = [tokenizer(row["prompt"]).input_ids for row in rows]
    cut, lost = sum(len(one) > 40 for one in ids), sum(len(one) >= 40 for one in prompts)
    assert 0 < lost < cut <= 40
    assert (int(told[1]), int(told[3])) == (cut, lost)  # the same rows, before the data run
    short = mine("plan", "every.sft.seq_length=8", **TWO)
    with pytest.raises(
        PipelineError, match=r"math-\S+: sft.seq_length=8 leaves no row with a loss. Raise it above"
    ):
        show_plan(short)
    line = (
        f"truncates {cut} of 40 rows of {data.name}, {lost} of them before any response: these are"
        " dropped"
    )
    assert line in show_plan(config)
    (tmp_path / "base/chat_template.jinja").write_text("{{ raise_exception('no turns') }}")
    with pytest.raises(
        PipelineError, match=r"row 1 of train.jsonl: The chat template of .* \(no turns\)"
    ):
        show_plan(mine("plan", "every.sft.seq_length=40", "every.sft.template=chat", **TWO))


def test_fewer_rows_than_the_steps_need_are_refused_by_the_plan(mine: Command) -> None:
    """By the files that a data run will read, and by its own rows.

    A last line may end without a line feed.
    """
    data = next(
        run
        for run in order_runs(Planning.of(mine("plan", **TWO)).targets())
        if run.config.stage == "data"
    )
    for _ in range(2):
        assert show_plan(mine("plan", "every.sft.steps=10", "every.sft.batch_size=4", **TWO))
        causes = refused(
            show_plan, mine("plan", "every.sft.steps=11", "every.sft.batch_size=4", **TWO)
        )
        expected = (
            r"math-\S+: sft.steps=11 with sft.batch_size=4 needs more rows than 40 in"
            r" each of sft."
        )
        assert sum(bool(re.match(expected, cause)) for cause in causes) == 1, causes
        make_run(data)


@pytest.mark.parametrize("stage", ["plan", "sft"])
def test_copies_and_rows_with_blanks_are_no_rows_of_it(
    stage: str, mine: Command, tmp_path: Path, call: Call
) -> None:
    """Nine of the fifteen rows are left, which the training says if the plan does not."""
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
    told = call(f"stage={stage}", *words)
    assert (
        told.status == 1
        and "sft.steps=3 with sft.batch_size=4 needs more rows than 9 in each" in told.err
    )


@pytest.mark.parametrize("name", ["own.jsonl", "own.json", "own.csv", "own.tsv"])
@pytest.mark.parametrize("template", ["plain", "chat"])
def test_rows_without_a_loss_are_refused_by_the_plan_as_by_the_training(
    name: str, template: str, mine: Command, tmp_path: Path, call: Call
) -> None:
    """Of files of each form that holds text.

    No GPU hour is spent on a table whose last training has no row.
    """
    rows = [
        {"q": f"Mia has {n} cups and {n} more. How many cups has she in all?", "a": f"{n + n}"}
        for n in range(12)
    ]
    separator = "\t" if name.endswith("tsv") else ","
    lines = [separator.join(row.values()) for row in [{"q": "q", "a": "a"}, *rows]]
    texts = {
        "own.json": json.dumps(rows, indent=1),
        "own.jsonl": "\n".join(map(json.dumps, rows)) + "\n",
    }
    (tmp_path / name).write_text(texts.get(name, "\n".join(lines)))
    turns = (
        "{% for m in messages %}<{{m.role}}>{{m.content}}{% if m.role == 'assistant' %}</s>{% endif"
        " %}{% endfor %}"
    )
    (tmp_path / "base/chat_template.jinja").write_text(
        turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    words = [
        "model=./base",
        "recipe=sandbox_math",
        "expert=own",
        "data_root=.",
        f"expert.sources.own.file={name}",
        "expert.sources.own.prompt='{q}'",
        "expert.sources.own.completion='{a}'",
        f"sft.template={template}",
        "sft.batch_size=4",
        "sft.micro_batch_size=4",
        "sft.steps=2",
        "runs_dir=./runs",
        "sft.warmup_steps=0",
        "tracking.mode=disabled",
        "sft.seq_length=12",
    ]
    told = "sft.seq_length=12 leaves no row with a loss. Raise it above the length"
    for stage in ("plan", "sft"):
        assert told in call(f"stage={stage}", *words, status=1).err.splitlines()[-1]


def test_rows_with_a_blank_column_are_counted_and_dropped(
    mine: Command, tmp_path: Path, monkeypatch: Patch
) -> None:
    """By the reading that counts rows which are cut, too.

    A plan of these looks at a file's first rows once.
    """
    read: list[Path] = []
    monkeypatch.setattr(
        training_rows, "read_rows", lambda file: read.append(file) or read_rows(file)
    )
    rows = [
        {"q": f"what is {n}?", "hint": "" if n % 3 else "count", "none": " ", "a": f"{n}"}
        for n in range(24)
    ]
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, *rows[:5]])
    )
    own = {
        "stage": "sft",
        "model": "trained",
        "model.path": "./base",
        "expert": "own",
        "expert.sources.own.url": "./own.jsonl",
        "expert.sources.own.completion": "{a}",
    }
    told = (
        "own.jsonl: 19 of 29 rows are dropped, as their column hint is blank: {hint?} keeps them in"
        " a template with"
    )

    def plan_of(prompt: str) -> Any:
        runs = {
            "base": {"checkpoint": "./base"},
            "math": own | {"expert.sources.own.prompt": prompt},
        }
        return mine("plan", "plan.lines=1", axes={"language": ["en"]}, runs=runs)

    with_blanks, without = (show_plan(plan_of(prompt)) for prompt in ("{q} {hint}", "{q} {hint?}"))
    assert (
        told in with_blanks
        and told not in without
        and "sft.learning_rate=1e-06 is the default, for mo" in without
    )
    assert "own.jsonl: 5 of 29 rows are dropped, as an earlier row says the same" in without
    assert [file.name for file in read] == ["own.jsonl"]
    (cause,) = refused(show_plan, plan_of("{q} {none}"))
    assert cause.startswith("source own (./own.jsonl): all 29 rows are unusable (29 null or blank")


def test_prompts_that_do_not_fit_are_what_the_stage_refuses(
    mine: Command, tmp_path: Path, monkeypatch: Patch
) -> None:
    """stage=plan looks at them where plan.prompts asks it to, stage=table always.

    The second time from what is kept.
    """
    longest = json.loads((tmp_path / "base/config.json").read_text())["max_position_embeddings"]
    long = {"score": {"eval": "mgsm_2shot", "in": "{language}", "eval.max_gen_toks": longest - 30}}
    show_plan(mine("plan", **TWO, **long))
    causes = refused(show_plan, mine("plan", "plan.prompts=true", **TWO, **long))
    assert (
        len(causes) == 2 and len(list((tmp_path / "runs" / LENGTHS).iterdir())) == 2
    )  # base and expert share them
    for cause, code in zip(causes, ("en", "qac"), strict=True):
        words = [
            "stage=eval",
            "checkpoint=./base",
            "eval=mgsm_2shot",
            f"languages=[{code}]",
            "data_root=./data",
        ]
        run = build(
            compose(
                [
                    *words,
                    "runs_dir=./runs",
                    "tracking.mode=disabled",
                    f"eval.max_gen_toks={longest - 30}",
                ]
            )
        )  # type: ignore[arg-type]
        with pytest.raises(PipelineError) as stage:
            make_run(run)
        assert cause.startswith(f"2 evaluations cannot run: {stage.value} (")
    monkeypatch.setattr(prompts, "measured", lambda *_: pytest.fail("measured again"))
    assert refused(make_table, mine("table", **TWO, **long)) == causes
    assert not list((tmp_path / "runs").glob("math-*"))
    config = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 2 * longest})
    )
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        show_plan(mine("plan", "plan.prompts=true", **TWO, **long))


def test_the_job_that_continues_leaves_prompts_to_others(
    tmp_path: Path, call: Command, monkeypatch: Patch
) -> None:
    """They check them, too; for that alone the job would load the harness.

    A command typed by hand measures them.
    """
    asked: list[bool] = []
    monkeypatch.setattr(
        "pipeline.commands.plan.evaluation_problems",
        lambda runs, reasons, prompts, waiting: asked.append(prompts) or ["enough"],
    )
    command = ("stage=table", "table=sandbox", f"runs_dir={tmp_path}", "launcher=slurm")
    assert call(*command).status == 1
    monkeypatch.setenv("PIPELINE_CONTINUES", "1")
    assert call(*command).status == 1
    assert asked == [True, False]
