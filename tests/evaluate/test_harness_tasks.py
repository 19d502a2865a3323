"""Tasks of the harness from local rows, against simple_evaluate on the same files."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import datasets
import forked
import lm_eval.tasks
import pytest
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.tasks import TaskManager
from made_up import Notes, Scripted, asked, choice, none_stored, run_of, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from pipeline.__main__ import main
from pipeline.api import evaluate
from pipeline.config.compose import compose, stage_of
from pipeline.config.harness_tasks import (
    file_of,
    forget_files,
    harness_index,
    include,
    is_group,
    members,
    shipped,
)
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.evaluate import torch_backend
from pipeline.evaluate.prompts import load_tasks
from pipeline.evaluate.score import score_tasks
from pipeline.evaluate.stage import make
from pipeline.evaluate.tasks import task_specs
from pipeline.hub import reach
from pipeline.hub.lock import Lock
from pipeline.launch.plan_file import Task
from pipeline.launch.work import Session
from pipeline.report.load.answers import answers_of
from pipeline.runs.graph import order_runs
from pipeline.stages.rows import build

LETTERS = "ABCD"


def arc(number: int) -> dict[str, Any]:
    texts = [f"thing {number + place}" for place in range(3 + number % 2)]
    labels = list(LETTERS[: len(texts)])
    return {
        "id": str(number),
        "question": f"Which thing is {number}?",
        "answerKey": labels[number % 3],
        "choices": {"text": texts, "label": labels},
    }


def gsm8k(number: int) -> dict[str, Any]:
    return {
        "question": f"What is {number} and 1?",
        "answer": f"<<{number}+1={number + 1}>>\n#### {number % 4}",
    }


def mmlu_prox(number: int) -> dict[str, Any]:
    subject = members("mmlu_prox_sw")[number % 14].removeprefix("mmlu_prox_sw_").replace("_", " ")
    options = {f"option_{place}": f"{number + place}" if place < 3 else None for place in range(10)}
    thoughts = {"cot_content": f"Jibu: {number}. Jibu ni (A)."}
    return {
        "question": f"Ni {number}?",
        "category": subject,
        "answer": LETTERS[number % 3],
        **options,
        **thoughts,
    }


ROWS: dict[str, tuple[dict[str, int], Any]] = {  # task -> rows of each split, and what makes a row
    "arc_easy": ({"test": 7, "train": 3, "validation": 2}, arc),
    "gsm8k": ({"test": 6, "train": 6}, gsm8k),
    "wikitext": (
        {"test": 3, "train": 1, "validation": 1},
        lambda number: {"page": f" = Page {number} = \n\n It has {number} words , no more . \n"},
    ),
    "lambada_openai": ({"test": 5}, lambda number: {"text": f"{number} and {number} and {number}"}),
    "cola": (
        {"validation": 40, "train": 3},
        lambda number: {
            "sentence": f"{number} {'and' * (number % 5)}.",
            "label": number % 2,
            "idx": number,
        },
    ),
    "winogrande": (
        {"validation": 6, "train": 2},
        lambda number: {
            "sentence": f"{number} and _ are here",
            "answer": str(number % 2 + 1),
            "option1": "one",
            "option2": "all",
        },
    ),
    "xnli_sw": (
        {"validation": 5, "train": 3},
        lambda number: {
            "premise": f"Ni {number}.",
            "hypothesis": f"Si {number}.",
            "label": number % 3,
        },
    ),
    "xcopa_sw": (
        {"test": 6, "validation": 3},
        lambda number: {
            "premise": f"Ni {number}.",
            "choice1": f"Si {number}.",
            "choice2": "Ndiyo.",
            "label": number % 2,
            "question": ["cause", "effect"][number % 2],
        },
    ),
    "mmlu_prox_sw": ({"test": 42, "validation": 42}, mmlu_prox),
}


@pytest.fixture(autouse=True)
def nothing_included() -> Iterator[None]:
    forget_files()
    yield
    forget_files()


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the rows of each task, and let `datasets` read them in place of the Hub's."""
    folders = {}
    for task, (splits, row) in ROWS.items():
        stock = file_of(members(task)[0]).body
        folders[stock["dataset_path"], stock.get("dataset_name")] = tmp_path / f"rows/{task}"
        for split, count in splits.items():
            write_rows(
                tmp_path / f"rows/{task}/{split}.jsonl",
                [row(len(split) + index) for index in range(count)],
            )
    real = datasets.load_dataset

    def load(path: str, name: str | None = None, **given: Any) -> Any:
        if (path, name) not in folders:
            return real(path, name, **given)
        files = sorted(folders[path, name].glob("*.jsonl"))
        return real("json", data_files={file.stem: str(file) for file in files})

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(reach, "refusal_of_set", lambda repository: None)
    return tmp_path / "rows"


def stock_model(checkpoint: Path) -> HFLM:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    return HFLM(model, tokenizer=AutoTokenizer.from_pretrained(checkpoint), batch_size=2)


def scored(
    folder: Path, tiny: Path, task: str, shots: int = 0, **knobs: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the facts and the score rows of an evaluation of a task in English."""
    (folder / "work").mkdir()
    run = run_of(
        folder,
        tiny,
        None,
        asked(task, shots),
        languages=["en"],
        dtype="float32",
        **knobs,
    )
    facts = make(run, folder / "work", Notes())  # type: ignore[arg-type]
    return facts, json.loads((folder / "work/scores.json").read_text())["rows"]


def by_stock(
    checkpoint: Path, task: str | Path, own: Path | None = None, **knobs: Any
) -> dict[str, Any]:
    """Return the harness' result of a task from a folder or a file."""
    manager = TaskManager(include_defaults=False, include_path=str(own) if own else None)
    tasks: Any = [str(task)]
    lm = stock_model(checkpoint)
    found = simple_evaluate(lm, tasks=tasks, task_manager=manager, **{"bootstrap_iters": 0} | knobs)
    assert found is not None
    return found


def stock_scores(
    task: str, shots: int, data_root: Path, checkpoint: Path, folder: Path
) -> tuple[dict[str, float], list[tuple[str, Any]]]:
    """Return the harness' result with its own files and local rows.

    The result has scores, and each question's prompt and response.
    """
    files = {split: str(data_root / f"{task}/{split}.jsonl") for split in ROWS[task][0]}
    here = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    folder.mkdir()
    for part in members(task):
        stock = dict(file_of(part).body)
        body = {
            "include": str(harness_index()[part]),
            "task": f"{part}_here",
            **here,
        }
        if stock["output_type"] == "generate_until":
            body["generation_kwargs"] = {**stock["generation_kwargs"], "max_gen_toks": 12}
        (folder / f"{part}.yaml").write_text(yaml.safe_dump(body))
    if is_group(task):
        group = dict(file_of(task).body)
        group |= {"group": f"{task}_here", "task": [f"{part}_here" for part in members(task)]}
        (folder / "group.yaml").write_text(yaml.safe_dump(group))
    found = by_stock(checkpoint, f"{task}_here", folder, num_fewshot=shots)
    numbers = found["results"][f"{task}_here"]
    scores = {
        name: value for name, value in numbers.items() if "," in name and "_stderr" not in name
    }
    questions = {
        (place, one["doc_id"]): (one["arguments"][0][0], one["resps"][0][0])
        for place, part in enumerate(members(task))
        for one in found["samples"][f"{part}_here"]
    }
    return scores, [questions[key] for key in sorted(questions)]


@pytest.mark.parametrize(
    ("task", "shots"),
    [
        *[("arc_easy", 2), ("gsm8k", 3), ("wikitext", 0), ("lambada_openai", 0), ("xnli_sw", 0)],
        *[("cola", 0), ("winogrande", 0), ("xcopa_sw", 2), ("mmlu_prox_sw", 1)],
    ],
)
def test_scores_are_the_harness_own(
    task: str, shots: int, rows: Path, tmp_path: Path, tiny: Path
) -> None:
    where = "sw" if task.endswith("_sw") else "en"
    knobs: dict[str, Any] = {"dtype": "float32", "languages": [where], "max_gen_toks": 12}
    work = tmp_path / "work"
    work.mkdir()
    make(run_of(tmp_path, tiny, None, asked(task, shots), **knobs), work, Notes())  # type: ignore[arg-type]
    scored = json.loads((work / "scores.json").read_text())["rows"]
    whole = [row for row in scored if row["metric"] != "cut_off" and not row["subject"]]
    ours = {f"{row['metric']},{row['filter']}": row["value"] for row in whole}
    stock, questions = stock_scores(task, shots, rows, tiny, tmp_path / "stock")
    assert ours.keys() == stock.keys()
    assert ours == {name: pytest.approx(value, rel=1e-5) for name, value in stock.items()}
    first = scored[0]
    assert (first["task"], first["language"], first["n"]) == (
        task,
        where,
        7 if task == "arc_easy" else first["n"],
    )
    whole_set = (
        "mcc",
        "perplexity",
        "bits_per_byte",
        "byte_perplexity",
        "word_perplexity",
    )  # means of no numbers
    assert [row["metric"] for row in whole if row["stderr"] is None] == [
        row["metric"] for row in whole if row["metric"] in whole_set
    ]
    lines = read_jsonl(work / f"samples/{task}.{where}.jsonl")
    assert [line["prompt"] for line in lines] == [prompt for prompt, _ in questions]
    if first["metric"] == "exact_match":
        assert [line["response"] for line in lines] == [response for _, response in questions]
    if first["metric"] in ("acc", "exact_match") and task != "lambada_openai":
        assert mean(line["correct"] for line in lines) == pytest.approx(first["value"])
    elif (
        first["metric"] == "mcc"
    ):  # of pairs of the right and the chosen answer: none is right or wrong by itself
        assert {line["correct"] for line in lines} == {None}
    if task == "winogrande":  # its options are two prompts
        for line, stored in zip(
            lines, read_jsonl(rows / "winogrande/validation.jsonl"), strict=True
        ):
            assert line["loglikelihoods"].keys() == {"1: are here", "2: are here"}
            assert line["correct"] == (line["response"][0] == stored["answer"])
    assert len(lines) == max(count for split, count in ROWS[task][0].items() if split != "train")
    chances = {
        "arc_easy": (4 / 3 + 3 / 4) / 7,
        "winogrande": 1 / 2,
        "xcopa_sw": 1 / 2,
        "xnli_sw": 1 / 3,
    }
    if task in chances:  # arc has four questions with three options, and three with four
        assert answers_of(("", task, where), lines).chance == pytest.approx(chances[task])
    else:
        assert answers_of(("", task, where), lines).chance is None


@pytest.mark.parametrize(("by_size", "inside"), [(True, False), (False, False), (False, True)])
def test_a_group_is_aggregated_as_the_harness_does(
    by_size: bool, inside: bool, tmp_path: Path, tiny: Path
) -> None:
    """Two tasks of 3 and 7 questions, user-defined.

    The scores, and the mean over questions, are the group's; `inside`: also where one of them is in
    a group that is defined inside of the group's file.
    """
    own, files = tmp_path / "own", {}
    own.mkdir()
    for name, count in (("small", 3), ("large", 7)):
        files[name] = own / f"{name}.jsonl"
        write_rows(
            files[name], [{"text": f"{number} and", "label": number % 2} for number in range(count)]
        )
        body = {
            "task": f"sums_{name}",
            "dataset_path": "json",
            "output_type": "multiple_choice",
            "test_split": "test",
            "doc_to_text": "text",
            "doc_to_target": "label",
            "doc_to_choice": ["one", "three"],
            "dataset_kwargs": {"data_files": {"test": str(files[name])}},
            "metric_list": [{"metric": "acc"}],
        }
        (own / f"{name}.yaml").write_text(yaml.safe_dump(body))
    aggregate = {"metric": "acc", "aggregation": "mean", "weight_by_size": by_size}
    large = {
        "group": "the larger",
        "task": ["sums_large"],
        "aggregate_metric_list": [{"metric": "acc"}],
    }
    listed = ["sums_small", large if inside else "sums_large"]
    group = {"group": "sums", "task": listed, "aggregate_metric_list": [aggregate]}
    (own / "sums.yaml").write_text(yaml.safe_dump(group))
    include(str(own))
    facts, rows = scored(tmp_path, tiny, "sums")
    stock = by_stock(tiny, "sums", own, bootstrap_iters=2)
    assert [(row["subject"], row["n"]) for row in rows] == [
        (None, 10),
        ("sums_small", 3),
        ("sums_large", 7),
    ]
    expected = stock["groups"]["sums"]
    assert rows[0]["value"] == facts["scores"]["sums/en/acc"] == pytest.approx(expected["acc,none"])
    assert rows[0]["stderr"] == pytest.approx(expected["acc_stderr,none"])
    for row in rows[1:]:
        assert row["value"] == pytest.approx(stock["results"][row["subject"]]["acc,none"])
    questions = read_jsonl(tmp_path / "work/samples/sums.en.jsonl")
    assert len({question["doc_id"] for question in questions}) == 10
    assert mean([question["scores"]["acc"] for question in questions]) == pytest.approx(
        expected["acc,none"]
    )


OF_A_TAG = {"group": "arcs", "task": ["ai2_arc", {"group": "more", "task": ["arc_challenge_chat"]}]}


@pytest.mark.parametrize(
    ("group", "folder"),
    [
        ("mmlu_continuation", "mmlu"),
        ("lm_syneval", "lm_syneval"),
        ("darijammlu", "darijammlu"),
        ("arcs", "arc"),
    ],
)
def test_members_of_a_group_are_those_of_the_harness(
    group: str, folder: str, tmp_path: Path
) -> None:
    """Groups inside of groups, also two deep; names with brackets.

    A tag whose tasks are in another folder.
    """
    from lm_eval.tasks._index import Kind, TaskIndex

    (tmp_path / "arcs.yaml").write_text(yaml.safe_dump(OF_A_TAG))
    (tmp_path / "one.yaml").write_text(yaml.safe_dump({"task": "own_one", **PLAIN}))
    include(str(tmp_path))
    known = TaskIndex().build([Path(lm_eval.tasks.__file__).parent / folder, tmp_path])

    def leaves(listed: Any) -> Iterator[str]:
        """As TaskFactory builds them, without their data."""
        for item in [listed] if isinstance(listed, str) else listed:
            name = item if isinstance(item, str) else item.get("group") or item["task"]
            entry = known.get(name)
            if entry is None or entry.kind is Kind.GROUP:
                yield from leaves(entry.cfg["task"] if entry and entry.cfg else item["task"])
            else:
                yield from sorted(entry.tags) if entry.kind is Kind.TAG else [name]

    assert sorted(members(group)) == sorted(set(leaves(known[group].cfg["task"])))  # type: ignore[index]


def test_files_that_define_the_same_task_are_read_as_by_the_harness(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one counts, and Jupyter's copies do not. The others are warned of."""
    from lm_eval.tasks._index import TaskIndex

    for place in (".ipynb_checkpoints/one", "b/one", "b-c/one", "B/two", "a/two"):
        file = tmp_path / f"{place}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(yaml.safe_dump({"task": f"own_{file.stem}", **PLAIN}))
    include(str(tmp_path))
    known = TaskIndex().build([tmp_path])
    for name in ("own_one", "own_two"):
        assert harness_index()[name] == known[name].yaml_path
    assert harness_index()["own_one"] == tmp_path / "b-c/one.yaml"
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [
        f"warning: {tmp_path}/a/two.yaml is not read,"
        f" because {tmp_path}/B/two.yaml defines own_two too",
        f"warning: {tmp_path}/b/one.yaml is not read,"
        f" because {tmp_path}/b-c/one.yaml defines own_one too",
    ]


@pytest.mark.parametrize("name", ["mgsm", "flores"])
def test_an_own_task_with_the_name_of_a_benchmark_is_refused(
    name: str, tmp_path: Path, tiny: Path
) -> None:
    own = write_own(tmp_path, name)
    words = [
        "stage=eval",
        f"checkpoint={tiny}",
        f"eval.tasks=[{name}]",
        f"eval.include_path={own}",
        f"data_root={tmp_path}",
        f"runs_dir={tmp_path / 'runs'}",
    ]
    with pytest.raises(
        PipelineError, match=f"{name} of .* has the name of a benchmark. Rename the task"
    ):
        build(compose(words))


def test_an_option_that_lists_its_task_as_text_is_refused(
    tmp_path: Path, tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if a task of eval.include_path has the name of the option."""
    option = tmp_path / "conf/eval/own_sum.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("name: own_sum\ntasks: [own_sum]\n")
    own = write_own(tmp_path, "own_sum")
    words = ["stage=eval", f"checkpoint={tiny}", "eval=own_sum", f"eval.include_path={own}"]
    words += ["languages=[en]", f"runs_dir={tmp_path / 'runs'}"]
    assert main([f"--config-dir={tmp_path / 'conf'}", *words]) == 1
    assert "error: eval.tasks.0=own_sum: it is a mapping" in capfd.readouterr().err


def test_tasks_and_groups_are_those_of_the_harness() -> None:
    from lm_eval.tasks._index import TaskIndex

    folder = Path(lm_eval.tasks.__file__).parent
    known = TaskIndex().build([folder])
    assert len(shipped()) > 13_000
    for name, file in shipped().items():
        assert known[name].yaml_path == file, name


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (
            {"task": "arc_easy", "num_fewshot": 25},
            "sets num_fewshot of arc_easy in its own file. Write that as a task",
        ),
        (
            {"group": "inner", "task": ["arc_easy"], "num_fewshot": 25},
            "sets num_fewshot of inner in its own file",
        ),
        ({"dataset_path": "json"}, "sets dataset_path of an entry without a name in its own file"),
        ("arc_esy", "has an unknown task arc_esy"),
    ],
)
def test_a_group_that_changes_its_tasks_is_refused(entry: Any, why: str, tmp_path: Path) -> None:
    (tmp_path / "changed.yaml").write_text(
        yaml.safe_dump({"group": "changed", "task": ["arc_challenge", entry]})
    )
    (tmp_path / "one.yaml").write_text(yaml.safe_dump({"task": "own_one", **PLAIN}))
    include(str(tmp_path))
    with pytest.raises(PipelineError, match=f"The group changed {why}"):
        members("changed")


def test_any_number_of_exemplars_is_an_option(tmp_path: Path) -> None:
    """mgsm_Nshot, as documented: the nearest option's tasks with N.

    On the command line and in a table.
    """
    words = {"stage": "eval", "checkpoint": "hub:a/b", "languages": ["en"]}
    for name, tasks in (
        ("mgsm_3shot", ["mgsm"]),
        ("belebele_1shot", ["belebele"]),
        ("mgsm_en_cot_4shot", ["mgsm_en_cot"]),
        ("mgsm_steps_2shot", ["mgsm_steps", "mgsm_steps_nums", "mgsm_steps_shuffled"]),
    ):
        shots = int(re.findall(r"(\d+)shot", name)[0])
        configs: list[Any] = [stage_of({**words, "eval": name})]
        configs.append(
            compose(["stage=eval", "checkpoint=hub:a/b", "languages=[en]", f"eval={name}"])
        )
        for config in configs:
            assert config.eval.name == name
            assert [(one.task, one.num_fewshot) for one in config.eval.tasks] == [
                (task, shots) for task in tasks
            ]
    three = build(
        compose(["stage=eval", "checkpoint=hub:a/b", "languages=[en]", "eval=mgsm_3shot"])
    )  # type: ignore[arg-type]
    spelled = ["eval=mgsm_2shot", "eval.tasks=[{task: mgsm, num_fewshot: 3}]"]
    same = build(compose(["stage=eval", "checkpoint=hub:a/b", "languages=[en]", *spelled]))  # type: ignore[arg-type]
    assert (three.hash, three.label) == (same.hash, same.label)
    with pytest.raises(PipelineError, match="eval=mgsn_3shot is not an option"):
        compose(["stage=eval", "checkpoint=hub:a/b", "eval=mgsn_3shot"])


@pytest.mark.parametrize(
    ("task", "shots", "knobs", "why"),
    [
        (
            "boolq",
            0,
            {},
            "boolq is a task of the harness, and data_root=.* has no rows of it. Name its rows",
        ),
        ("humaneval", 0, {}, "humaneval runs the model's programs without a sandbox. Score mbpp"),
        (
            "arc_easy",
            0,
            {"split": "dev"},
            "eval.split=dev: arc_easy scores the harness' split. Leave it out",
        ),
        ("arc_esy", 0, {}, "The task 'arc_esy' is unknown. Did you mean arc_easy?"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    task: str, shots: int, knobs: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(PipelineError, match=why):
        task_specs(choice(asked(task, shots), **knobs), ["en"], tmp_path, tmp_path / "tasks")


PLAIN = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "text",
    "doc_to_target": "label",
    "metric_list": [{"metric": "exact_match"}],
    "generation_kwargs": {"until": [" "]},
}

MUTUAL = "acc_mutual_info"
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_choice": ["a", "b", "c"],
    "metric_list": [{"metric": "acc"}],
}


def write_own(folder: Path, task: str, **keys: Any) -> Path:
    """Write a user-defined task with three questions."""
    own = folder / "own"
    own.mkdir(exist_ok=True)
    files = {"data_files": {"test": str(own / f"{task}.jsonl")}}
    body = {"task": task, **PLAIN, "dataset_kwargs": files, **keys}
    lines = yaml.safe_dump({key: value for key, value in body.items() if value is not None})
    (own / f"{task}.yaml").write_text(re.sub(r"'(!function [\w.]+)'", r"\1", lines))
    rows = [{"text": f"{number} and", "label": str(number)} for number in range(3)]
    write_rows(own / f"{task}.jsonl", rows)
    return own


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"doc_to_text": "txt"}, r"doc_to_text=txt, .* no column txt \(did you mean text"),
        (
            {"doc_to_target": "lable"},
            r"doc_to_target=lable, .* no column lable \(did you mean label",
        ),
        (
            {**CHOICES, "doc_to_target": "lable"},
            r"the target of row 1, 'lable', is not among its 3 choices",
        ),
        (
            {**CHOICES, "doc_to_target": "{{label|int + 1}}"},
            r"the target of row 3, 3, is not among its 3 choices",
        ),
        ({**CHOICES, "doc_to_target": "{{label|int}}"}, None),
    ],
)
def test_an_own_task_that_would_count_all_answers_as_wrong_is_refused(
    keys: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    """The harness takes the misspelt name of a column as text, and only warns of wrong labels."""
    include(str(write_own(tmp_path, "own_sum", **keys)))
    definitions = task_specs(choice(asked("own_sum", 0)), ["en"], None, tmp_path / "tasks")
    with pytest.raises(PipelineError, match=message) if message else nullcontext():
        assert len(load_tasks(definitions, Lock())) == 1


def test_own_tasks_enter_the_hash_and_run_python_with_consent_alone(
    tmp_path: Path, tiny: Path
) -> None:
    own = write_own(tmp_path, "own_sum", doc_to_text="!function own.text")
    (own / "own.py").write_text("def text(doc):\n    return doc['text']\n")
    words = [
        "stage=eval",
        f"checkpoint={tiny}",
        "eval=own_sum",
        f"eval.include_path={own}",
        "languages=[en]",
    ]
    words += [f"runs_dir={tmp_path / 'runs'}"]
    with pytest.raises(
        PipelineError,
        match=r"own_sum of eval.include_path=.* could run code: own_sum.yaml has !function",
    ):
        build(compose(words))
    hashes = []
    for more in ("", "", "# changed\n"):
        (own / "own.py").write_text((own / "own.py").read_text() + more)
        run = build(compose([*words, "eval.run_code=true"]))
        hashes.append((run.hash, run.parents["include_path"].hash))
    assert hashes[0] == hashes[1] and hashes[1][0] != hashes[2][0] and hashes[1][1] != hashes[2][1]
    planned: Any = run.parents["include_path"]
    assert not planned.has_changed
    (own / "own.py").write_text((own / "own.py").read_text() + "# while the run waits\n")
    assert planned.has_changed  # which refuses the run


def test_files_that_no_hash_knows_are_refused(tmp_path: Path, tiny: Path) -> None:
    """A template beside the folder may be edited.

    The run would be found, and its scores are of the earlier one.
    """
    own, common = (
        write_own(tmp_path, "own_sum", include="../common.yaml", doc_to_text=None),
        tmp_path / "common.yaml",
    )
    common.write_text("doc_to_text: text\n")
    words = [
        "stage=eval",
        f"checkpoint={tiny}",
        "eval=own_sum",
        f"eval.include_path={own}",
        "languages=[en]",
    ]
    words += [f"runs_dir={tmp_path / 'runs'}"]
    with pytest.raises(
        PipelineError, match=r"own_sum includes .*/common.yaml, outside of eval.include_path="
    ):
        build(compose(words))
    common.rename(own / "common.yaml")
    (own / "own_sum.yaml").write_text(
        (own / "own_sum.yaml").read_text().replace("../common", "common")
    )
    forget_files()  # the next command
    assert build(compose(words)).hash


def test_repeats_and_filters_are_the_tasks_own(tmp_path: Path, tiny: Path) -> None:
    """Two answers to each question, of which a filter takes the majority.

    The stock tool reads the same folder.
    """
    filters = [
        {"name": "vote", "filter": [{"function": "majority_vote"}, {"function": "take_first"}]}
    ]
    generation = {"until": [" "], "max_gen_toks": 3}
    own = write_own(
        tmp_path, "own_vote", filter_list=filters, generation_kwargs=generation, repeats=2
    )
    include(str(own))
    _, (row, *_) = scored(tmp_path, tiny, "own_vote")
    stock = by_stock(tiny, "own_vote", own)
    assert (row["filter"], row["n"]) == ("vote", 3)
    assert row["value"] == pytest.approx(stock["results"]["own_vote"]["exact_match,vote"])
    answers = [
        line["extracted"] for line in read_jsonl(tmp_path / "work/samples/own_vote.en.jsonl")
    ]
    assert answers == [line["filtered_resps"][0] for line in stock["samples"]["own_vote"]]


def test_commands_of_one_process_may_name_a_task_alike(tmp_path: Path, tiny: Path) -> None:
    """Two folders of eval.include_path, one after the other.

    Within one command a name is of one of them.
    """
    scored = {}
    for name, text in (("a", "{{text}}"), ("b", "one two three {{text}}")):
        (tmp_path / name).mkdir()
        own = write_own(tmp_path / name, "own_alike", doc_to_text=text)
        words = {
            "languages": ["en"],
            "runs_dir": tmp_path / "runs",
        }
        frame = evaluate(
            checkpoint=tiny, eval="own_alike", include_path=own, max_gen_toks=3, **words
        )
        (file,) = (frame.attrs["folder"] / "samples").glob("*.jsonl")
        scored[name] = [line["prompt"] for line in read_jsonl(file)]
    assert scored["b"] == [f"one two three {prompt}" for prompt in scored["a"]]
    include(str(tmp_path / "b/own"))
    with pytest.raises(PipelineError, match="the name own_alike exists already. Rename the task"):
        include(str(tmp_path / "a/own"))


def test_a_metric_of_some_questions_is_the_mean_over_these(tmp_path: Path, tiny: Path) -> None:
    """As the stock tool has it, a question whose scores lack a metric does not count in it."""
    names = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("exact_match", "length")
    ]
    own = write_own(tmp_path, "own_some", process_results="!function own.scores", metric_list=names)
    (own / "own.py").write_text(
        "def scores(doc, answers):\n    some = {'length': len(answers[0])} if doc['label'] != '1'"
        " else {}\n    return {'exact_match': float(doc['label'] == '2'), **some}\n"
    )
    include(str(own))
    _, found = scored(tmp_path, tiny, "own_some", max_gen_toks=5, run_code=True)
    (file,) = (tmp_path / "work/tasks").glob("*.yaml")
    (expected,) = by_stock(tiny, file)["results"].values()
    rows = {row["metric"]: row for row in found}
    assert rows["length"]["value"] == expected["length,none"] and rows["length"]["n"] == 2
    assert rows["exact_match"]["value"] == pytest.approx(1 / 3) and rows["exact_match"]["n"] == 3


def test_an_own_task_is_sampled(tmp_path: Path, tiny: Path) -> None:
    """As AIME is: four answers to each question of local rows, after the model's thoughts.

    All of them are asked for in one pass; scores by hand from the stored answers.
    """
    own = write_own(tmp_path, "own_aime", generation_kwargs={"until": [], "max_gen_toks": 24})
    include(str(own))
    passes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        real = torch_backend.decode
        patch.setattr(
            torch_backend, "decode", lambda *given: passes.append(len(given[2])) or real(*given)
        )
        facts, found = scored(
            tmp_path, tiny, "own_aime", temperature=1.5, answers=4, think_end="38"
        )
    assert passes == [12]
    samples = read_jsonl(tmp_path / "work/samples/own_aime.en.jsonl")
    answers = [[one["response"] for one in sample["answers"]] for sample in samples]
    assert [len(each) for each in answers] == [4] * 3 and len(
        {text for each in answers for text in each}
    ) > 6
    assert any("thinking" in one for sample in samples for one in sample["answers"])
    right = [
        [float(text.strip() == str(number)) for text in each] for number, each in enumerate(answers)
    ]
    rows = {row["metric"]: row for row in found}
    assert (
        rows["exact_match"]["value"]
        == facts["scores"]["own_aime/en/exact_match"]
        == mean(map(mean, right))
    )
    assert rows["pass@4"]["value"] == mean(map(max, right)) and rows["pass@4"]["n"] == 3
    assert {"pass@1", "pass@2", "majority", "cut_off"} < rows.keys()


def test_what_has_another_answer_each_time_is_refused(tmp_path: Path, tiny: Path) -> None:
    how = {"until": [], "max_gen_toks": 4, "do_sample": True, "temperature": 1.5}
    include(str(write_own(tmp_path, "own_drawn", generation_kwargs=how)))
    work = tmp_path / "work"
    work.mkdir()
    run = run_of(tmp_path, tiny, None, asked("own_drawn", 0), languages=["en"], dtype="float32")
    with pytest.raises(PipelineError, match="do_sample .* Set eval.temperature"):
        make(run, work, Notes())  # type: ignore[arg-type]
    drawn = replace(run, config=replace(run.config, eval=replace(run.config.eval, temperature=1.5)))
    make(drawn, work, Notes())  # type: ignore[arg-type]
    assert all("cut_off" in sample for sample in read_jsonl(work / "samples/own_drawn.en.jsonl"))


@pytest.mark.parametrize("turns", [None, True, False])
def test_a_system_prompt_and_exemplars_in_one_turn_are_the_harness_own(
    tmp_path: Path, rows: Path, tiny: Path, turns: bool | None
) -> None:
    """Without a chat template the system prompt stands before the exemplars."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if"
        " add_generation_prompt %}<a>{% endif %}"
    )
    config = json.loads((tiny / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (tiny / "tokenizer_config.json").write_text(json.dumps(config))
    how: dict[str, Any] = {"system_instruction": "Answer with a number."}
    ours = how | ({} if turns is None else {"chat_template": True, "fewshot_as_multiturn": turns})
    theirs = how | (
        {} if turns is None else {"apply_chat_template": True, "fewshot_as_multiturn": turns}
    )
    own = write_own(
        tmp_path, "own_sum", fewshot_config={"samples": [{"text": "1 and", "label": "1"}] * 2}
    )
    include(str(own))
    scored(tmp_path, tiny, "own_sum", 2, max_gen_toks=3, **ours)
    (file,) = (tmp_path / "work/tasks").glob("*.yaml")
    (lines,) = by_stock(tiny, file, **theirs)["samples"].values()
    prompts = [line["prompt"] for line in read_jsonl(tmp_path / "work/samples/own_sum.en.jsonl")]
    assert prompts == [line["arguments"][0][0] for line in lines]
    assert (
        "Answer with a number." in prompts[0]
        and prompts[0].count("<user>") == {None: 0, True: 3, False: 1}[turns]
    )


@pytest.mark.parametrize("templated", [False, True])
def test_mutual_information_is_the_harness_own(templated: bool, tmp_path: Path, tiny: Path) -> None:
    """Each option is also weighed after an empty prompt, which no chat template writes."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    config = json.loads((tiny / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (tiny / "tokenizer_config.json").write_text(json.dumps(config))
    keys = {
        **CHOICES,
        "doc_to_target": "{{label|int}}",
        "metric_list": [{"metric": "acc"}, {"metric": MUTUAL}],
    }
    include(str(write_own(tmp_path, "own_mutual", **keys)))
    _, found = scored(tmp_path, tiny, "own_mutual", chat_template=templated)
    (file,) = (tmp_path / "work/tasks").glob("*.yaml")
    stock = by_stock(tiny, file, apply_chat_template=templated)
    ((name, expected),) = stock["results"].items()
    rows = {row["metric"]: row["value"] for row in found}
    assert {metric: rows[metric] for metric in ("acc", MUTUAL)} == pytest.approx(
        {metric: expected[f"{metric},none"] for metric in ("acc", MUTUAL)}
    )
    lines = read_jsonl(tmp_path / "work/samples/own_mutual.en.jsonl")
    for ours, theirs in zip(lines, stock["samples"][name], strict=True):
        assert (
            ours["prompt"] == theirs["arguments"][0][0] and ours["scores"][MUTUAL] == theirs[MUTUAL]
        )
        likelihoods = [
            likelihood for likelihood, _ in theirs["filtered_resps"][:3]
        ]  # after the question
        assert [*ours["loglikelihoods"].values()] == pytest.approx(likelihoods)
        best = likelihoods.index(max(likelihoods))
        assert [*ours["loglikelihoods"]][best] == ours["response"] and len(
            ours["loglikelihoods"]
        ) == 3


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            {"test_split": None},
            "own_bad has no test data. Set test_split or validation_split in its task file",
        ),
        (
            {"metric_list": [{"metric": "./script"}]},
            "its metric ./script is not the harness' but a program",
        ),
        (
            {"process_results": "!function own.scores"},
            "its metric exact_match is 'zero', which is not a number",
        ),
        ({"include": "own_bad.yaml"}, "own_bad.yaml includes itself or is included twice. Remove"),
        (
            {**CHOICES, "doc_to_target": "{{label|int}}", "metric_list": [{"metric": "f1"}]},
            "cannot be scored",
        ),
    ],
)
def test_bad_own_tasks_are_refused(keys: dict[str, Any], why: str, tmp_path: Path) -> None:
    functions = (
        "def scores(doc, answers):\n    return {'exact_match': 0}\n\ndef zero(values):\n    return"
        " 'zero'\n"
    )
    run_code = "process_results" in keys
    if run_code:
        keys = {
            **keys,
            "metric_list": [{"metric": "exact_match", "aggregation": "!function own.zero"}],
        }
    own = write_own(tmp_path, "own_bad", **keys)
    (own / "own.py").write_text(functions)
    include(str(own))
    with pytest.raises(PipelineError, match=why):
        settings = choice(asked("own_bad", 0), run_code=run_code)
        definitions = task_specs(settings, ["en"], None, tmp_path / "tasks")
        score_tasks(
            Scripted(),
            definitions,
            load_tasks(definitions, Lock()),
            settings,
            none_stored(tmp_path),
        )


def own_with_rows(folder: Path) -> Path:
    """Write a folder of eval.include_path with a task that names its own rows."""
    own = folder / "own"
    rows = [{"text": f"{number} and", "label": str(number)} for number in range(3)]
    write_rows(own / "counting.jsonl", rows)
    body = {
        "task": "own_counting",
        **PLAIN,
        "dataset_kwargs": {"data_files": {"test": str(own / "counting.jsonl")}},
    }
    (own / "counting.yaml").write_text(yaml.safe_dump(body))
    return own


def run_tasks(tasks: list[Task], in_job: bool, folder: Path) -> str:
    """Return a fresh worker's result of tasks, on this machine or in a Slurm array."""
    session = Session(folder / f"session-{len(list(folder.iterdir()))}", tasks)
    words = ["task", str(session.folder), "0", ""] if in_job else [str(session.folder), "0"]
    told = session.folder / "told"
    worker = forked.started(
        ("-m", "pipeline.launch.worker", *words), [Path(os.devnull), told, told]
    )
    while session.left and worker.is_alive():
        time.sleep(0.1)
        session.look()
    worker.terminate()
    worker.join()
    return told.read_text(encoding="utf-8") + "".join(session.failed.values())


@pytest.mark.parametrize(("in_job", "beside"), [(False, True), (True, False)])
def test_own_tasks_are_known_in_the_processes_that_compute_a_plan(
    in_job: bool, beside: bool, tmp_path: Path, tiny: Path
) -> None:
    """A worker has read no configuration: it is handed runs.

    Alone, and beside MGSM of data_root in one command.
    """
    own, root = own_with_rows(tmp_path), tmp_path / "root"
    write_rows(
        root / "mgsm/en/test.jsonl", [{"question": "1 and 1?", "answer": None, "answer_number": 2}]
    )
    tasks = (
        ["eval.tasks=[own_counting,mgsm]", f"data_root={root}"] if beside else ["eval=own_counting"]
    )
    words = [
        "stage=eval",
        f"checkpoint={tiny}",
        *tasks,
        f"eval.include_path={own}",
        f"runs_dir={tmp_path / 'runs'}",
    ]
    words += ["languages=[en]", "eval.max_gen_toks=3", "tracking.mode=disabled"]
    run = build(compose(words))  # type: ignore[arg-type]
    runs = order_runs([run])
    labels = [one.label.partition("-tiny")[0] for one in runs[:2]]
    assert labels == ["eval-own_counting_0shot", "eval-mgsm_0shot"][: 1 + beside]
    told = run_tasks([Task.of(one) for one in runs], in_job, tmp_path)
    assert "unknown task" not in told, told
    rows = json.loads((run.folder / "scores.json").read_text())["rows"]
    counts = {row["task"]: row["n"] for row in rows if row["metric"] == "exact_match"}
    assert counts == {"own_counting": 3, **({"mgsm": 1} if beside else {})}
    task = Task.of(runs[0])
    shutil.rmtree(runs[0].folder)
    (own / "counting.yaml").write_text((own / "counting.yaml").read_text() + "# changed\n")
    assert "was changed after eval-own_counting" in run_tasks([task], False, tmp_path)


def recite(folder: Path, tokenizer_of: Path, start: int, text: str, penalty: float) -> Path:
    """Return a GPT-2 that writes `text` after `start` tokens.

    Its predictions depend only on the position.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=128,
        n_embd=128,
        n_layer=1,
        n_head=2,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter.zero_()
        model.transformer.wte.weight.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(128))
        model.lm_head.weight.zero_()
        for place, token in enumerate(ids):
            model.lm_head.weight[token, start - 1 + place] = 1
    model.generation_config.repetition_penalty = penalty
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "penalty", [None, 1.0001]
)  # by our decoding, and by transformers' generate
@pytest.mark.parametrize(
    "written",
    ["1.\n\n2</t>\n\n42\n\nmore", "1.\n\nno end of the thought", "</t>42", "1</t>2\n\n3</t>4"],
)
def test_a_stop_string_in_a_thought_ends_no_answer(
    written: str, penalty: float | None, tmp_path: Path, tiny: Path
) -> None:
    """The answer is the one that the harness cuts from the whole text, as its vLLM class does."""
    stop = ["\n\n"]
    generation = {"until": stop, "max_gen_toks": 40}
    include(str(write_own(tmp_path, "own_think", generation_kwargs=generation)))
    prompt = AutoTokenizer.from_pretrained(tiny)("0 and").input_ids
    model = recite(tmp_path / "reciting", tiny, len(prompt), written, penalty or 1.0)
    scored(tmp_path, model, "own_think", think_end="</t>")
    samples = read_jsonl(tmp_path / "work/samples/own_think.en.jsonl")
    text = written
    if penalty is None and written.count("</t>") == 2:
        text = "1</t>2\n\n"  # our decoding ends at the first stop string after a thought
    expected = postprocess_generated_text(text, stop, "</t>")
    assert [sample["response"] for sample in samples] == [expected] * 3
    thought = text.rpartition("</t>")[0] if "</t>" in text else None
    assert [sample.get("thinking") for sample in samples] == [thought] * 3
    assert not any(sample["cut_off"] for sample in samples)


def test_variables_of_a_chat_template_are_the_harness_own(tmp_path: Path, tiny: Path) -> None:
    """As --model_args enable_thinking=False. They are part of the run's hash."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<a>"
        "{% if not enable_thinking|default(true) %}<think></think>{% endif %}{% endif %}"
    )
    config = json.loads((tiny / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (tiny / "tokenizer_config.json").write_text(json.dumps(config))
    own = write_own(tmp_path, "own_sum")
    include(str(own))
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype="float32")
    stock = HFLM(
        model, tokenizer=AutoTokenizer.from_pretrained(tiny), batch_size=2, enable_thinking=False
    )
    off = {"chat_template": True, "chat_template_args": {"enable_thinking": False}}
    scored(tmp_path, tiny, "own_sum", max_gen_toks=3, **off)
    (file,) = (tmp_path / "work/tasks").glob("*.yaml")
    manager = TaskManager(include_defaults=False)
    found = simple_evaluate(
        stock, tasks=[str(file)], task_manager=manager, bootstrap_iters=0, apply_chat_template=True
    )
    (lines,) = found["samples"].values()  # type: ignore[index]
    prompts = [line["prompt"] for line in read_jsonl(tmp_path / "work/samples/own_sum.en.jsonl")]
    assert prompts == [line["arguments"][0][0] for line in lines]
    assert all(prompt.endswith("<think></think>") for prompt in prompts)
    words = [
        "stage=eval",
        f"checkpoint={tiny}",
        "eval=own_sum",
        f"eval.include_path={own}",
        "languages=[en]",
    ]
    plain = [
        *words,
        f"runs_dir={tmp_path / 'runs'}",
        "eval.chat_template=true",
    ]
    hashes = {
        build(compose([*plain, *more])).hash
        for more in (
            [],
            ["eval.chat_template_args={enable_thinking: false}"],
            ["eval.chat_template_args={a: 1}"],
        )
    }
    assert len(hashes) == 3


@pytest.mark.parametrize(
    "key", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"]
)
def test_a_length_has_any_of_its_names(key: str, tmp_path: Path, tiny: Path) -> None:
    """A task file may name it as transformers or vLLM do; 8192 positions hold no 8190 more."""
    include(str(write_own(tmp_path, "own_long", generation_kwargs={"until": [], key: 5})))
    scored(tmp_path, tiny, "own_long")
    (file,) = (tmp_path / "work/tasks").glob("*.yaml")
    (lines,) = by_stock(tiny, file)["samples"].values()
    samples = read_jsonl(tmp_path / "work/samples/own_long.en.jsonl")
    assert [sample["response"] for sample in samples] == [line["resps"][0][0] for line in lines]
    assert all(sample["cut_off"] for sample in samples)
    forget_files()
    (tmp_path / "more").mkdir()
    include(
        str(write_own(tmp_path / "more", "own_long", generation_kwargs={"until": [], key: 8190}))
    )
    with pytest.raises(PipelineError, match="3 of 3 prompts do not fit"):
        scored(tmp_path / "more", tiny, "own_long")


def test_each_metric_of_a_choice_is_the_harness_own(tmp_path: Path, tiny: Path) -> None:
    """Also metrics whose value for a question is an array (brier_score) or a pair (f1, mcc)."""
    names = ["acc", "acc_norm", "acc_bytes", "brier_score", "f1", "mcc", "exact_match"]
    options = {**CHOICES, "doc_to_choice": ["one", "another"], "doc_to_target": "{{label|int % 2}}"}
    keys = {**options, "metric_list": [{"metric": name} for name in names]}
    include(str(write_own(tmp_path, "own_choice", **keys)))
    _, found = scored(tmp_path, tiny, "own_choice")
    (file,) = (tmp_path / "work/tasks").glob("*.yaml")
    ((_, expected),) = by_stock(tiny, file)["results"].items()
    rows = {row["metric"]: row["value"] for row in found}
    stock = {name: expected[f"{name},none"] for name in names if f"{name},none" in expected}
    assert "brier_score" in stock and {name: rows[name] for name in stock} == pytest.approx(stock)


def task_hash(tmp_path: Path, tiny: Path, own: Path, task: str = "own_sum") -> str:
    words = [
        "stage=eval",
        f"checkpoint={tiny}",
        f"eval={task}",
        f"eval.include_path={own}",
        "languages=[en]",
    ]
    forget_files()
    return build(compose([*words, f"runs_dir={tmp_path / 'runs'}"])).hash


def test_only_files_that_a_task_reads_change_its_hash(tmp_path: Path, tiny: Path) -> None:
    """Not a file of another task beside it; but its own file, what that includes, and its rows."""
    own = write_own(tmp_path, "own_sum", include="common.yaml", doc_to_text=None)
    rows = write_own(tmp_path, "own_other") / "own_sum.jsonl"
    (own / "common.yaml").write_text("doc_to_text: text\n")
    first = task_hash(tmp_path, tiny, own)
    (own / "own_other.yaml").write_text((own / "own_other.yaml").read_text() + "# changed\n")
    (own / "notes.txt").write_text("a file of nobody\n")
    (own / "unused.py").write_text("a = 1\n")
    assert task_hash(tmp_path, tiny, own) == first
    (own / "common.yaml").write_text("doc_to_text: '{{text}}'\n")
    second = task_hash(tmp_path, tiny, own)
    rows.write_text(json.dumps({"text": "1 and", "label": "2"}) + "\n")
    assert len({first, second, task_hash(tmp_path, tiny, own)}) == 3


def test_rows_that_a_task_names_by_a_pattern_are_part_of_its_hash(
    tmp_path: Path, tiny: Path
) -> None:
    own = write_own(tmp_path, "own_sum")
    folder = own / "rows"
    files = {"dataset_kwargs": {"data_files": {"test": str(folder / "*.jsonl")}}}
    write_own(tmp_path, "own_sum", **files)
    hashes, scores = [], []
    for number, label in enumerate(("0", "38")):
        write_rows(
            folder / "test.jsonl", [{"text": f"{place} and", "label": label} for place in range(3)]
        )
        hashes.append(task_hash(tmp_path, tiny, own))
        (tmp_path / str(number)).mkdir()
        include(str(own))
        scored(tmp_path / str(number), tiny, "own_sum", max_gen_toks=2)
        scores.append(read_jsonl(tmp_path / f"{number}/work/samples/own_sum.en.jsonl")[0]["target"])
    assert hashes[0] != hashes[1] and scores == ["0", "38"]
    outside = tmp_path / "elsewhere"
    folder.rename(outside)
    (own / "own_sum.yaml").write_text(
        (own / "own_sum.yaml").read_text().replace(str(folder), str(outside))
    )
    with pytest.raises(PipelineError, match="outside of eval.include_path="):
        task_hash(tmp_path, tiny, own)
