"""The study form: what it is written out as, and that it is computed like a table."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fixture_types import Call, Patch
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from planned import shipped
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config.compose import compose
from pipeline.config.harness_tasks import forget_files
from pipeline.errors import PipelineError
from pipeline.runs.graph import order_runs
from pipeline.stages.steps import training_rows
from pipeline.tables.planned_runs import Planning
from pipeline.tables.reader import read_table
from pipeline.tables.study import expand_study

STUDY = {
    "base": "./base",
    "experts": {"math": "./math", "sw": {"run": "./sw", "side": "language"}},
    "methods": ["layer_swap", "soup"],
    "languages": ["en", "sw"],
    "benchmarks": ["mgsm_2shot"],
}


def test_a_study_is_written_out_as_this_table() -> None:
    assert expand_study(
        STUDY | {"controls": True, "every": {"data_root": "./data"}}, "swahili.yaml"
    ) == {
        "name": "swahili",
        "title": "Merges of experts",
        "controls": True,
        "primary": ["layer_swap", "math", "mgsm sw"],
        "family": ["mgsm sw"],
        "baselines": {"math": "†", "base": "‡"},
        "every": {"model": "./base", "data_root": "./data"},
        "runs": {
            "base": {},
            "math": {"checkpoint": "./math"},
            "sw": {"checkpoint": "./sw"},
            "layer_swap": {
                "merge": "layer_swap",
                "merge.math": "math",
                "merge.language": "sw",
                "merge.base": "base",
            },
            "soup": {"merge": "soup", "merge.experts": ["math", "sw"], "merge.base": "base"},
        },
        "columns": {
            "mgsm en": {"eval": "mgsm_2shot", "in": "en"},
            "mgsm sw": {"eval": "mgsm_2shot", "in": "sw"},
        },
        "rows": {name: {"run": name} for name in ("base", "math", "sw", "layer_swap", "soup")},
        "compare": {"layer_swap": ["math", "sw", "base"], "soup": ["math", "sw", "base"]},
    }


def test_adapters_are_scored_on_the_base_of_the_study(tmp_path: Path) -> None:
    """Whatever base they name: unsloth writes that of a copy in four bits."""
    named = {"math": "unsloth/llama-3-8b-bnb-4bit", "sw": str(tmp_path / "base")}
    for name, base in named.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": base})
        )
    experts = {
        "math": str(tmp_path / "math"),
        "sw": {"run": str(tmp_path / "sw"), "side": "language"},
    }
    study = STUDY | {"base": str(tmp_path / "base"), "experts": experts}
    runs = [expand_study(study, "s")["runs"] for _ in range(2)][0]
    assert [runs[name]["eval.base"] for name in experts] == [
        "base",
        "base",
    ] and "eval.base" not in runs["base"]
    plain = expand_study(study | {"base": None}, "s")["runs"]
    assert all("eval.base" not in words for words in plain.values())


def test_an_expert_has_the_side_of_its_option() -> None:
    experts = {"one": {"expert": "math"}, "mathias": {"expert": "sw"}}
    swap = expand_study(STUDY | {"experts": experts}, "s")["runs"]["layer_swap"]
    assert swap == {"merge": "layer_swap", "merge.math": "one", "merge.language": "mathias"}


def test_one_of_a_kind_needs_no_list() -> None:
    alone = {"methods": "soup", "languages": "sw", "benchmarks": "mgsm_2shot"}
    assert expand_study(STUDY | alone, "s") == expand_study(
        STUDY | {k: [v] for k, v in alone.items()}, "s"
    )


def test_several_experts_are_merged_two_by_two_and_flores_has_both_directions() -> None:
    experts = {
        "math": {"expert": "math"},
        "sw": {"expert": "sw", "sft": "lora"},
        "bn": "bn-full-0123456789ab",
    }
    methods = {"layer_swap": {"bottom_layers": 2}, "ties": None}
    study = {
        "base": "llama3.1_8b",
        "experts": experts,
        "methods": methods,
        "languages": ["en", "sw"],
        "benchmarks": ["flores_0shot", "mgsm_0shot", "mgsm_8shot"],
    }
    table = expand_study(study, "mine.yaml")
    assert table["runs"]["sw"] == {"stage": "sft", "expert": "sw", "sft": "lora"}
    assert table["runs"]["layer_swap sw"] == {
        "merge": "layer_swap",
        "merge.math": "math",
        "merge.language": "sw",
        "merge.bottom_layers": 2,
    }
    assert table["runs"]["ties bn"] == {
        "merge": "ties",
        "merge.experts": ["math", "bn"],
        "merge.base": "base",
    }
    assert list(table["columns"]) == [
        "flores en-sw",
        "flores sw-en",
        "mgsm_0shot en",
        "mgsm_0shot sw",
        "mgsm_8shot en",
        "mgsm_8shot sw",
    ]
    assert table["columns"]["flores sw-en"] == {"eval": "flores_0shot", "in": "sw", "pair": "sw-en"}


def test_a_benchmark_may_have_its_items_elsewhere(
    call: Call, tmp_path: Path, monkeypatch: Patch
) -> None:
    """As the sentence about a benchmark that data_root lacks says: null is the Hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "world").mkdir()
    experts = {"math": {"expert": "math"}, "sw": {"expert": "sw"}}
    study = STUDY | {
        "base": "sandbox",
        "experts": experts,
        "languages": ["en"],
        "every": {"data_root": "./world"},
    }

    def planned(*benchmarks: Any) -> Planning:
        Path("s.yaml").write_text(yaml.safe_dump(study | {"benchmarks": [*benchmarks]}))
        return Planning.of(compose(["stage=plan", "table=./s.yaml", "runs_dir=./runs"]))  # type: ignore[arg-type]

    own = {"eval": "gsm8k_5shot", "data_root": None}
    roots = {
        (run.config.eval.name, run.config.data_root) for run in planned("mgsm_0shot", own).scoring()
    }
    assert roots == {("mgsm_0shot", "./world"), ("gsm8k_5shot", None)}
    assert set(planned(own).plan.columns) == {"gsm8k en"}
    told = call("stage=plan", "table=./s.yaml", "runs_dir=./runs")
    assert "give gsm8k a data_root" not in told.err
    planned("gsm8k_5shot")
    told = call("stage=plan", "table=./s.yaml", "runs_dir=./runs")
    assert "give gsm8k another data_root (null: the Hub" in told.err


def test_an_expert_of_own_rows_is_a_training_on_that_file(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Its columns are no axes, and its file is read beside any data_root."""
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("q,a\n" + "".join(f"what is {n}?,{n}\n" for n in range(40)))
    own = {
        "train": "mine.csv",
        "prompt": "Swali: {q}",
        "completion": "{a}",
        "language": "sw",
        "sft": "lora",
    }
    table = expand_study(STUDY | {"experts": {"math": own, "swahili": own | {"sft.steps": 3}}}, "s")
    assert table["runs"]["swahili"] == {
        "stage": "sft",
        "expert": "own",
        "expert.name": "swahili",
        "expert.side": "language",
        "expert.sources.own.url": "./mine.csv",
        "expert.sources.own.rows": "template",
        "expert.sources.own.prompt": "Swali: {q}",
        "expert.sources.own.completion": "{a}",
        "expert.sources.own.language": "sw",
        "sft": "lora",
        "sft.steps": 3,
    }
    assert table["runs"]["math"]["expert.side"] == "math"
    (tmp_path / "data/mgsm/sw").mkdir(parents=True)
    (tmp_path / "data/mgsm/sw/test.jsonl").write_text(
        '{"question": "1 + 1?", "answer": null, "answer_number": 2}\n'
    )
    study = STUDY | {
        "base": "sandbox",
        "experts": {"math": own, "sw": own | {"sft.steps": 3}},
        "languages": ["sw"],
        "benchmarks": ["mgsm_0shot"],
        "every": {"data_root": "./data"},
    }
    Path("s.yaml").write_text(yaml.safe_dump(study))
    planning = Planning.of(compose(["stage=plan", "table=./s.yaml", "runs_dir=./runs"]))  # type: ignore[arg-type]
    data = [run for run in order_runs(planning.targets()) if run.config.stage == "data"]
    assert not planning.problems and {run.config.data.benchmarks for run in data} == {"./data"}
    assert all(
        "data_root" not in run.parents and training_rows(run, expected=True) == 40 for run in data
    )
    for changes, told in (
        ({"train": "gone.csv"}, "experts: sw: train=gone.csv is not a file of "),
        (
            {"train": ["mine.csv"]},
            f"experts: sw: train=['mine.csv'] is not a file of {tmp_path}. Give one file, not a",
        ),
        (
            {"completion": "a"},
            "experts: sw: completion='a' names no column of mine.csv: write completion: \"{",
        ),
        (
            {"completion": None, "compeltion": "{a}"},
            "run 'sw': stage=sft does not read compeltion: did you mean comp",
        ),
    ):
        Path("s.yaml").write_text(
            yaml.safe_dump(study | {"experts": {"math": own, "sw": own | changes}})
        )
        with pytest.raises(PipelineError, match=re.escape(f"./s.yaml, {told}")):
            Planning.of(compose(["stage=plan", "table=./s.yaml", "runs_dir=./runs"]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"q,a\n", "source own (./theirs.csv) has no rows. Choose"),
        (b"q;a\nx;y\n", "source own (./theirs.csv) has no column q, a. Its columns are q;a"),
        (b"q,a\nx,caf\xe9\n", "./theirs.csv is not readable as UTF-8 text"),
        (b"", "source own (./theirs.csv) has no rows. Choose"),
        (b"q,a\nx,y,z\n", "./theirs.csv, line 2 has 3 cells, and the header has 2"),
    ],
)
@pytest.mark.parametrize("steps", [{}, {"sft.steps": 2}])
def test_a_file_that_cannot_be_read_is_one_thing_to_fix(
    content: bytes, problem: str, steps: Any, call: Call, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The data run says why, and neither the steps nor the rows of its training say it again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("q,a\n" + "".join(f"what is {n}?,{n}\n" for n in range(40)))
    (tmp_path / "theirs.csv").write_bytes(content)
    (tmp_path / "data/mgsm/sw").mkdir(parents=True)
    (tmp_path / "data/mgsm/sw/test.jsonl").write_text(
        '{"question": "1 + 1?", "answer": null, "answer_number": 2}\n'
    )
    own = {"prompt": "{q}", "completion": "{a}", "sft.batch_size": 4, **steps}
    experts = {"math": {"train": "mine.csv", **own}, "sw": {"train": "theirs.csv", **own}}
    study = STUDY | {
        "base": "sandbox",
        "experts": experts,
        "benchmarks": ["mgsm_0shot"],
        "languages": ["sw"],
    }
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(study | {"every": {"data_root": "./data"}}))
    told = call("stage=plan", "table=./s.yaml", "runs_dir=./runs")
    assert "Next: fix it" in told.out and told.err.count("error: ") == 1, told.err
    assert f"error: {problem}" in told.err


def test_a_method_has_a_name_of_its_own_and_may_be_a_file_of_mergekit() -> None:
    methods = {
        "narrow": {"merge": "layer_swap", "bottom_layers": 2},
        "wide": {"merge": "layer_swap"},
        "theirs": {"merge": "mergekit", "file": "./recipe.yaml"},
    }
    table = expand_study(STUDY | {"methods": methods}, "s")
    swap = {
        "merge": "layer_swap",
        "merge.math": "math",
        "merge.language": "sw",
        "merge.base": "base",
    }
    assert (
        table["runs"]["narrow"] == swap | {"merge.bottom_layers": 2}
        and table["runs"]["wide"] == swap
    )
    assert table["runs"]["theirs"] == {
        "merge": "mergekit",
        "merge.experts": ["math", "sw"],
        "merge.file": "./recipe.yaml",
    }
    assert [*table["rows"]] == ["base", "math", "sw", "narrow", "wide", "theirs"]
    with pytest.raises(PipelineError, match="mergekit is not a merge of two experts"):
        expand_study(STUDY | {"methods": ["mergekit"]}, "s")


def test_with_two_languages_each_merge_is_compared_in_its_own_and_in_english() -> None:
    experts = {"math": "./math", "sw": "./sw", "te": "./te"}
    study = STUDY | {"experts": experts, "languages": ["en", "te", "sw"], "methods": ["soup"]}
    table = expand_study(study, "s")
    assert table["rows"]["soup sw"] == {"run": "soup sw", "columns": ["mgsm en", "mgsm sw"]}
    assert table["rows"]["soup te"]["columns"] == ["mgsm en", "mgsm te"] and table["rows"][
        "te"
    ] == {"run": "te"}
    assert table["primary"] == ["soup sw", "math", "mgsm sw"]
    alone = expand_study(study | {"experts": {"math": "./math", "sw": "./sw"}}, "s")
    assert alone["rows"]["soup"] == {"run": "soup"}  # of one expert everywhere


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"language": ["sw"]},
            r"s.yaml, language: not a key of a study, which has experts: did you mean languages",
        ),
        ({"languages": []}, "s.yaml, languages: a study names at least one"),
        (
            {"languages": ["sw", False]},
            r"languages: False is no name. Write languages: \[sw, te\]\. Quote no, yes",
        ),
        (
            {"benchmarks": [{"data_root": None}]},
            r"benchmarks: \{'data_root': None\} is no name. Write benchmarks: \[",
        ),
        (
            {"benchmarks": [{"eval": "arc_easy", "in": "en"}]},
            r"\{'eval': 'arc_easy', 'in': 'en'\} is no name. Write ",
        ),
        (
            {"languages": [{"eval": "a", "data_root": None}]},
            r"languages: .* is no name. Write languages: \[sw, te\]\.$",
        ),
        (
            {"benchmarks": ["mgsm_2shot", None]},
            r"benchmarks: None is no name. Write benchmarks: \[mgsm_8shot, \{eval",
        ),
        ({"experts": ["./math"]}, r"s.yaml, experts: a study needs names and experts, \{math"),
        (
            {"experts": {"math": {"run": "a", "side": "maths"}}},
            "math: side=maths is neither math nor language",
        ),
        ({"experts": {"math": {"run": "a", "expert": "math"}}}, "experts: math: give only run"),
        (
            {"experts": {"math": "./a", "math2": "./b"}},
            "s.yaml, experts: no expert of side language",
        ),
        ({"methods": ["reset"]}, "s.yaml, methods: reset is not a merge of two experts"),
        (
            {"methods": ["layer_swop"]},
            "layer_swop is not a merge of two experts: did you mean layer_swap",
        ),
        (
            {"methods": {"soup": 0.3}},
            "s.yaml, methods: soup: expected a mapping of names to values, got 0.3",
        ),
        (
            {"methods": [{"soup": {}}]},
            r"s.yaml, methods: \{'soup': \{\}\} is not a merge of two experts: there are",
        ),
        (
            {"every": ["sft.steps: 2"]},
            r"s.yaml, every: expected a mapping of names to values, got \['sft.steps: 2'\]",
        ),
        (
            {"experts": {"a": {"expert": "math_sw"}}},
            "experts: a: side=both is neither math nor language. Write",
        ),
        (
            {"base": None, "experts": {"math": {"expert": "math"}}},
            "experts: math: no base to train it from. Give base",
        ),
        ({"base": None, "controls": True}, "s.yaml, controls: a control has the base"),
    ],
)
def test_what_is_no_study_is_one_sentence(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(PipelineError, match=problem):
        expand_study({**STUDY, **changes}, "s.yaml")


def test_a_study_without_experts_is_no_table() -> None:
    """Else its base would be the unknown key of a table."""
    text = yaml.safe_dump({key: value for key, value in STUDY.items() if key != "experts"})
    with pytest.raises(
        PipelineError,
        match=r"^s.yaml, experts: a study needs names and experts, \{math: ./FOLDER, sw",
    ):
        read_table(text, "s.yaml", shipped, {})


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_a_study_scores_all_models_in_one_dtype_whatever_was_trained(
    call: Call, tmp_path: Path, weights: str
) -> None:
    """A base in float32 and bfloat16 experts, as one GPU trains them, are compared in float32."""
    call("stage=data", "expert=sandbox", f"runs_dir={tmp_path}/world")
    (world,) = (tmp_path / "world").glob("data-sandbox-*")
    file = tmp_path / "mine.yaml"
    experts = {"math": {"expert": "math"}, "qac": {"expert": "qac", "side": "language"}}
    every = {"data_root": str(world), "data.size": 32, "sft.batch_size": 4, "sft.weights": weights}
    words = {"base": "sandbox", "experts": experts, "methods": ["soup"], "languages": ["en"]}
    file.write_text(yaml.safe_dump({**words, "benchmarks": ["mgsm_0shot"], "every": every}))
    planning = Planning.of(compose(["stage=plan", f"table={file}", f"runs_dir={tmp_path}"]))
    scores = [run for run in planning.targets() if run.config.stage == "eval"]
    assert len(scores) == 4 and {run.config.eval.dtype for run in scores} == {"float32"}
    assert [run.hash for run in planning.targets()] == [run.hash for run in scores]


@pytest.mark.parametrize("stage", ["plan", "table"])
def test_an_expert_that_the_hub_does_not_give_is_told_before_the_other_is_trained(
    call: Call, world: Path, tmp_path: Path, monkeypatch: Patch, stage: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    swahili = {"run": "hub:org/theirs", "side": "language"}
    experts = {"math": {"expert": "math", "recipe": "sandbox_math"}, "sw": swahili}
    every = {"sft.steps": 1, "sft.batch_size": 16}
    words = {
        "base": "sandbox",
        "experts": experts,
        "methods": ["soup"],
        "languages": "en",
        "every": every,
    }
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({**words, "benchmarks": "mgsm_0shot"}))
    told = call(
        f"stage={stage}",
        f"table={tmp_path}/s.yaml",
        f"data_root={world}",
        f"runs_dir={tmp_path}/runs",
    )
    assert (
        told.status == 1
        and "1 evaluation cannot run: hub:org/theirs cannot be reached, and is not" in told.err
    )
    assert not list((tmp_path / "runs").glob("math*")) and ("FIX" in told.out) == (stage == "plan")


def test_a_model_of_the_hub_is_scored_in_the_cache_and_named_where_it_cannot_be_fetched(
    call: Call, base: Path, world: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    words = [
        "stage=eval",
        "eval=mgsm_0shot",
        "languages=[en]",
        "eval.limit=2",
        "eval.max_gen_toks=4",
        "threads=1",
    ]
    words += [f"data_root={world}", f"runs_dir={tmp_path}/runs", "checkpoint=hub:org/theirs"]
    assert (
        "hub:org/theirs cannot be reached, and is not in the local cache"
        in call(*words, status=1).err
    )
    for place in ("evaluate.stage", "evaluate.store", "evaluate.weights", "hub.models"):
        monkeypatch.setattr(
            f"pipeline.{place}.local_folder", {Path("org/theirs"): base}.__getitem__
        )
    assert call(*words).status == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"benchmarks": "mgsm_steps_2shot"},
            "3 evaluations cannot run: .*mgsm_steps/qac/train.jsonl",
        ),
        (
            {"benchmarks": "layer_swapping"},
            "eval=layer_swapping holds mgsm, .*. Say which of them is scored, task:",
        ),
        (
            {"every": {"eval": {"tasks": [{"task": "mgsm", "num_fewshot": 1}]}}, "languages": "sw"},
            "eval-mgsm_1shot-",
        ),
        (
            {"methods": {"layer_swap": {"bottom_layers": 30}}},
            "layers, but the model has 8. Lower them",
        ),
    ],
)
def test_what_cannot_be_scored_or_merged_is_told_before_experts_are_trained(
    changes: dict[str, object], problem: str, call: Call, world: Path, tmp_path: Path
) -> None:
    experts = {name: {"expert": name, "recipe": "sandbox_math"} for name in ("math", "qac")}
    study = {"base": "sandbox", "experts": experts, "languages": "qac", "benchmarks": "mgsm_0shot"}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(study | changes))
    told = call(
        "stage=plan", f"table={tmp_path}/s.yaml", f"data_root={world}", f"runs_dir={tmp_path}/runs"
    )
    assert told.status == 1 and re.search(problem, told.err) and "Traceback" not in told.err, (
        told.err
    )


def test_a_study_of_two_folders_is_computed_like_the_table_that_it_is(
    world: Path, base: Path, math_expert: Path, language_expert: Path, tmp_path: Path, call: Call
) -> None:
    study = STUDY | {
        "base": str(base),
        "experts": {"math": str(math_expert), "qac": str(language_expert)},
        "languages": ["qac"],
        "controls": True,
        "every": {"data_root": str(world), "eval": {"limit": 2, "max_gen_toks": 12}},
    }
    (tmp_path / "study.yaml").write_text(json.dumps(study))
    shared = [f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]
    told = call("stage=plan", f"table={tmp_path}/study.yaml", "plan.expand=true", *shared)
    assert told.status == 0 and yaml.safe_load(told.out)["runs"]["soup"]["merge"] == "soup"
    (tmp_path / "table.yaml").write_text(told.out)
    call("stage=table", f"table={tmp_path}/study.yaml", "launcher.workers=1", *shared, status=0)
    cells = (tmp_path / "runs/reports/study/cells.csv").read_text()
    assert "layer_swap" in cells and "control" in cells
    again = ("stage=table", f"table={tmp_path}/table.yaml", "launcher.workers=1", *shared)
    for command in ("stage=plan", "stage=table", "stage=report"):
        told = call(command, *again[1:], status=1)
        assert (
            f"holds the report of table={tmp_path}/study.yaml, which table={tmp_path}/table.yaml"
            " would replace" in told.err
        )
    assert (tmp_path / "runs/reports/study/cells.csv").read_text() == cells
    (tmp_path / "study.yaml").rename(tmp_path / "moved.yaml")
    call(*again, status=0)
    assert (tmp_path / "runs/reports/study/cells.csv").read_text() == cells


def test_all_mistakes_of_a_study_are_told_at_once() -> None:
    wrong = {"seeds": [0, 1], "lang": "sw", "methods": ["layer_swop", "soup"], "benchmarks": [3]}
    experts = {
        "math": {"expert": "math", "seed": [0, 1]},
        "sw": {"run": "./sw", "side": "left"},
        "te": "./te",
    }
    with pytest.raises(PipelineError) as refused:
        expand_study(STUDY | wrong | {"experts": experts}, "s.yaml")
    assert str(refused.value).split("\nerror: ") == [
        "s.yaml, seeds: write every: {seed: [0, 1, 2]}: each cell is then the mean over them",
        "s.yaml, lang: not a key of a study, which has experts: did you mean languages?",
        (
            "s.yaml, benchmarks: 3 is no name. Write benchmarks: [mgsm_8shot, {eval: gsm8k_5shot,"
            " data_root: null}, {mine: {sw: mine_sw, te: mine_te}}]."
        ),
        (
            "s.yaml, experts: math: seed=[0, 1]: write every: {seed: [0, 1, 2]}, for all trainings"
            " that set no seed."
        ),
        "s.yaml, experts: sw: side=left is neither math nor language. Write math or language.",
    ]


@pytest.fixture
def quechua(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with a task in English and one in Quechua, which is not shipped."""
    forget_files()
    (tmp_path / "tasks").mkdir()
    for code in ("en", "quz"):
        rows = tmp_path / f"tasks/{code}.jsonl"
        rows.write_text(
            "".join(
                json.dumps({"q": f"{code} {number}?", "gold": number % 2}) + "\n"
                for number in range(4)
            )
        )
        body = {
            "task": f"uywa_{code}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(rows)}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{q}}",
            "doc_to_choice": [" yes", " no"],
            "doc_to_target": "gold",
            "metric_list": [{"metric": "acc"}],
        }
        (tmp_path / f"tasks/uywa_{code}.yaml").write_text(yaml.safe_dump(body))
    yield tmp_path / "tasks"
    forget_files()


@pytest.mark.parametrize(
    ("benchmarks", "columns"),
    [
        (
            [{"uywa": {"en": "uywa_en", "quz": "uywa_quz"}}],
            {"uywa en": "uywa_en", "uywa quz": "uywa_quz"},
        ),
        (
            ["uywa_en", "uywa_quz"],
            {"uywa_en en": "uywa_en", "uywa_quz quz": "uywa_quz"},
        ),  # by the end of their names
        (
            ["uywa_quz", "arc_easy_5shot"],
            {"uywa_quz quz": "uywa_quz", "arc_easy": "arc_easy_5shot"},
        ),
    ],
)
def test_each_language_has_a_task_of_its_own(
    benchmarks: Any, columns: dict[str, str], quechua: Path
) -> None:
    """A task of the harness is one test set: no column shows it under another language."""
    study = STUDY | {"languages": ["en", "quz"], "every": {"eval": {"include_path": str(quechua)}}}
    table = expand_study(study | {"benchmarks": benchmarks}, "s.yaml")
    assert {name: words["eval"] for name, words in table["columns"].items()} == columns
    assert all(
        words["in"] == "quz" for name, words in table["columns"].items() if name.endswith("quz")
    )
    assert table["primary"][2].endswith("quz")


@pytest.mark.parametrize(
    ("benchmark", "problem"),
    [
        (
            {"uywa": {"en": "uywa_en", "qu": "uywa_quz"}},
            "uywa has a task for qu, which is not in languages. Add it",
        ),
        (
            {"uywa": {"en": "uywa_en"}},
            "no benchmark has a task for quz. Leave it out, or name a task for it",
        ),
    ],
)
def test_a_language_without_a_task_is_told(benchmark: Any, problem: str, quechua: Path) -> None:
    study = STUDY | {"languages": ["en", "quz"], "every": {"eval": {"include_path": str(quechua)}}}
    with pytest.raises(PipelineError, match=problem):
        expand_study(study | {"benchmarks": [benchmark]}, "s.yaml")


def test_a_language_that_no_benchmark_knows_is_scored_by_its_own_task(
    base: Path, math_expert: Path, language_expert: Path, quechua: Path, tmp_path: Path, call: Call
) -> None:
    """It needs no file of codes: the table is computed, each column on the rows of its task."""
    study = STUDY | {
        "base": str(base),
        "experts": {"math": str(math_expert), "qac": str(language_expert)},
        "methods": ["soup"],
        "languages": ["en", "quz"],
        "benchmarks": [{"uywa": {"en": "uywa_en", "quz": "uywa_quz"}}],
        "every": {"eval": {"include_path": str(quechua)}},
    }
    (tmp_path / "s.yaml").write_text(json.dumps(study))
    shared = [f"runs_dir={tmp_path}/runs", "tracking.mode=disabled", "launcher.workers=1"]
    call("stage=table", f"table={tmp_path}/s.yaml", *shared, status=0)
    prompts = {
        file.stem.rpartition(".")[2]: json.loads(file.read_text().splitlines()[0])["prompt"]
        for file in (tmp_path / "runs").glob("eval-*/samples/*.jsonl")
    }
    assert prompts == {"en": "en 0?", "quz": "quz 0?"}


def test_a_plan_tells_dtypes_and_bases_that_differ(
    base: Path, math_expert: Path, world: Path, tmp_path: Path, call: Call
) -> None:
    """A base in bfloat16 beside a float32 expert.

    An adapter that names another base, and one that does not fit.
    """
    model = AutoModelForCausalLM.from_pretrained(base)
    for name, kwargs in {"fits": {}, "wide": {"hidden_size": 2 * model.config.hidden_size}}.items():
        config = type(model.config).from_dict(model.config.to_dict() | kwargs)
        lora = LoraConfig(r=2, target_modules=["q_proj"], base_model_name_or_path="org/other")
        adapter = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
        adapter.peft_config["default"].base_model_name_or_path = "org/other"
        adapter.save_pretrained(tmp_path / name)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "small")
    experts = {
        "math": str(math_expert),
        "fits": {"run": str(tmp_path / "fits"), "side": "language"},
    }
    study = STUDY | {
        "base": str(tmp_path / "small"),
        "experts": experts,
        "methods": ["soup"],
        "languages": ["en"],
        "benchmarks": ["mgsm_0shot"],
        "every": {"data_root": str(world)},
    }
    (tmp_path / "s.yaml").write_text(json.dumps(study))
    told = call("stage=plan", f"table={tmp_path}/s.yaml", f"runs_dir={tmp_path}/runs")
    assert told.status == 0
    assert (
        "Models are stored in several dtypes (bfloat16: base" in told.out
        and "scored in float32" in told.out
    )
    assert (
        "fits is an adapter of org/other. It is merged with and scored on the study's base"
        in told.out
    )
    experts["fits"] = {"run": str(tmp_path / "wide"), "side": "language"}
    (tmp_path / "s.yaml").write_text(json.dumps(study | {"experts": experts}))
    told = call("stage=plan", f"table={tmp_path}/s.yaml", f"runs_dir={tmp_path}/runs")
    assert told.status == 1 and "trained on another base" in told.err


TAKEN = "s.yaml, base: the base or an expert has this name already. Rename"


@pytest.mark.parametrize(
    ("sw", "methods", "problem"),
    [
        ("base: {run: ./b, side: language}", "{soup: {}}", TAKEN),
        ("sw: {run: ./b, side: language}", "{base: {merge: soup}}", TAKEN),
        (
            "sw: {sft: lora, side: language}",
            "{soup: {}}",
            "s.yaml, run 'sw': stage=sft needs expert=... Choose from bn, ",
        ),
    ],
)
def test_an_expert_as_the_base_or_of_no_rows(
    call: Call, tmp_path: Path, sw: str, methods: str, problem: str
) -> None:
    """It would stand in the base's place: its row, and the comparisons with it."""
    text = (
        f"base: sandbox\nexperts: {{math: ./m, {sw}}}\nmethods: {methods}\nlanguages:"
        " en\nbenchmarks: mgsm_0shot\n"
    )
    (tmp_path / "s.yaml").write_text(text)
    assert (
        problem
        in call("stage=plan", f"table={tmp_path}/s.yaml", f"runs_dir={tmp_path}/runs", status=1).err
    )


def test_a_benchmark_without_questions_is_to_be_fixed(call: Call, tmp_path: Path) -> None:
    (tmp_path / "root/mgsm/en").mkdir(parents=True)
    (tmp_path / "root/mgsm/en/test.jsonl").touch()
    (tmp_path / "t.yaml").write_text(
        f"name: t\nevery: {{model: sandbox, data_root: {tmp_path}/root}}\nruns: {{base: {{}}}}\n"
        "score: {eval: mgsm_0shot}\nrows: {base: {run: base}}\ncolumns: {en: {in: en}}\n"
    )
    told = call("stage=plan", f"table={tmp_path}/t.yaml", f"runs_dir={tmp_path}/runs")
    assert told.status == 1 and "mgsm/en/test.jsonl is empty. Put the data there" in told.err
