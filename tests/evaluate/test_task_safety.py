"""Task files, model folders and chat templates from strangers.

Nothing of them runs, and each refusal is a sentence.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import BaseLoader, Environment, StrictUndefined, TemplateSyntaxError, meta
from lm_eval.utils import regex_replace
from made_up import asked, choice, write_rows

from pipeline.benchmarks.task_safety import refuse_card
from pipeline.config.harness_tasks import NAMED, forget_files, include
from pipeline.config.task_yaml import load_plain, read_task, shipped_folder
from pipeline.errors import PipelineError
from pipeline.evaluate.prompts import load_tasks
from pipeline.evaluate.tasks import task_specs
from pipeline.evaluate.templates import render
from pipeline.hub.lock import Lock
from pipeline.limits import time_limit
from pipeline.merge.write import refuse_link_outside
from pipeline.models.load import load_config, load_tokenizer
from pipeline.tables.reader import read_table
from pipeline.text import strings_in

SHELL = "os.system('touch CODE_RAN')"
CYCLER = "{{ cycler.__init__.__globals__." + SHELL + " }}{{q}}"
OWN = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "tasks/rows.jsonl"}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{q}}",
    "doc_to_target": "{{a}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 4},
    "metric_list": [{"metric": "exact_match"}],
}
LISTED = "{{ ''['_' ~ '_class_' ~ '_']['_' ~ '_mro_' ~ '_'] }}{{q}}"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    forget_files()
    yield
    forget_files()
    assert not list(tmp_path.rglob("CODE_RAN"))


def own_task(name: str = "own", **keys: Any) -> None:
    """Write a task file and its rows, and a Python file that says when it runs."""
    write_rows(
        Path("tasks/rows.jsonl"), [{"q": f"{number}?", "a": str(number)} for number in range(3)]
    )
    Path("evil").mkdir()
    Path("evil/evil.py").write_text(f"import os\n{SHELL}\n")
    text = yaml.safe_dump({"task": name, **OWN, **keys})
    Path("tasks/own.yaml").write_text(text.replace("'!function own.f'", "!function own.f"))


def load(name: str = "own", run_code: bool = False) -> Any:
    include("tasks")
    definitions = task_specs(choice(asked(name, 0), run_code=run_code), ["en"], None, Path("work"))
    (task,) = load_tasks(definitions, Lock())
    return task


HARNESS = str(shipped_folder())


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            {"doc_to_text": CYCLER},
            r"tasks/own.yaml: doc_to_text is refused by the sandbox of templates",
        ),
        ({"doc_to_target": f" {CYCLER}"}, r"own.yaml: doc_to_target is refused"),
        ({"doc_to_text": "{{ q|attr('__class__') }}"}, r"own.yaml: doc_to_text is refused"),
        ({"doc_to_text": LISTED}, r"own.yaml: doc_to_text is refused by the sandbox of templates"),
        (
            {"doc_to_text": "{{ 'x' * 10**9 }}"},
            r"doc_to_text is refused by the sandbox of templates \(it repeats",
        ),
        (
            {"doc_to_text": "{% for i in range(10**9) %}{% endfor %}"},
            r"doc_to_text is refused .*Range too big",
        ),
        (
            {"process_results": None, "metric_list": [{"metric": "./evil"}]},
            r"its metric ./evil is not the harness'",
        ),
        (
            {"process_results": "q", "metric_list": [{"metric": "./evil"}]},
            r"its metric ./evil is not the harness'",
        ),
        (
            {"generation_kwargs": {"custom_generate": "./evil", "trust_remote_code": True}},
            (
                r"could run code: generation_kwargs sets .*trust_remote_code.*. Give"
                r" eval.run_code=true"
            ),
        ),
        ({"use_prompt": "evil.yaml:x"}, r"could run code: .*use_prompt.* can name what"),
        (
            {
                "include": f"{HARNESS}/ruler/niah_single_1.yaml",
                "metadata": {"pretrained": "./evil"},
            },
            r"could run code: .*metadata.* can name what a function of the harness",
        ),
        (
            {"include": f"{HARNESS}/humaneval/humaneval.yaml", "unsafe_code": False},
            r"own runs the model's programs without a sandbox",
        ),
        (
            {"dataset_path": "./evil", "dataset_kwargs": None},
            r"own reads rows of the folder ./evil. Name their files",
        ),
        (
            {"dataset_kwargs": {"data_files": {"test": "file:///etc/passwd"}}},
            r"own reads file:///etc/passwd, outside",
        ),
        ({"dataset_kwargs": {"data_dir": "evil"}}, r"own reads rows of the folder evil"),
        (
            {"dataset_kwargs": {"data_files": "tasks/rows.jsonl", "cache_dir": "/x"}},
            r"own reads rows of the folder /x",
        ),
    ],
)
def test_a_task_file_runs_nothing_and_reads_nothing_outside(keys: dict[str, Any], why: str) -> None:
    own_task(**keys)
    with pytest.raises(PipelineError, match=why):
        load()


@pytest.mark.parametrize(
    "keys, why",
    [
        ({"output_type": "multi_choice"}, "output_type=multi_choice is not one of multiple_choice"),
        ({"metric_list": "acc"}, "own.yaml: metric_list='acc' is not what the harness reads"),
        ({"metric_list": ["acc"]}, "own.yaml: metric_list=.'acc'. is not what the harness reads"),
        ({"filter_list": 3}, "own.yaml: filter_list=3 is not what the harness reads"),
        ({"dataset_kwargs": "x"}, "own.yaml: dataset_kwargs='x' is not what the harness reads"),
        ({"generation_kwargs": 3}, "own.yaml: generation_kwargs=3 is not what the harness reads"),
        ({"include": 5}, "own.yaml: include=5 is not what the harness reads"),
        ({"num_fewshot": "three"}, "own.yaml: num_fewshot='three' is not what the harness reads"),
        ({"num_fewshot": 1.5}, "own.yaml: num_fewshot=1.5 is not what the harness reads"),
        ({"repeats": [1]}, "own.yaml: repeats=.1. is not what the harness reads"),
        ({"dataset_path": 5}, "own.yaml: dataset_path=5 is not what the harness reads"),
    ],
)
def test_values_of_another_type_are_named(keys: dict[str, Any], why: str) -> None:
    own_task(**keys)
    with pytest.raises(PipelineError, match=why):
        load()


@pytest.mark.parametrize(
    "listed", ["task: 5", "task: [own, 5]", "task: [own]\naggregate_metric_list: [acc]"]
)
def test_values_of_another_type_in_a_group_are_named(listed: str) -> None:
    own_task()
    Path("tasks/group.yaml").write_text(f"group: ours\n{listed}\n")
    with pytest.raises(PipelineError, match="group.yaml: .* is not what the harness reads"):
        load("ours")


def test_a_metric_that_does_not_exist_is_refused() -> None:
    """The harness logs that it is not found, and scores nothing."""
    own_task(metric_list=[{"metric": "exact_mach", "aggregation": "mean"}])
    with pytest.raises(PipelineError, match="its metric exact_mach is not the harness'"):
        load()
    with pytest.raises(PipelineError, match="the metric exact_mach does not exist"):
        load(run_code=True)


@pytest.mark.parametrize(
    "head", ["\ufefftask: own", "task : own", "task:\town", '"task" : "own" # mine']
)
def test_forms_of_a_name(head: str) -> None:
    own_task()
    text = Path("tasks/own.yaml").read_text().replace("task: own\n", "")
    Path("tasks/own.yaml").write_text(f"{head}\n{text}", encoding="utf-8")
    assert load().config.task.startswith("own_")


def test_a_file_with_two_names_is_refused() -> None:
    own_task()
    with Path("tasks/own.yaml").open("a") as file:
        file.write("task: other\n")
    with pytest.raises(PipelineError, match="own.yaml has more names than own. Write task: NAME"):
        load()


def test_a_name_that_cannot_name_files_is_an_error_with_its_file() -> None:
    own_task()
    Path("tasks/odd.yaml").write_text("task: [own]\n")
    with pytest.raises(PipelineError, match="odd.yaml: '.own.' cannot name a task"):
        load()


def test_an_own_task_with_the_name_of_another_option_is_refused() -> None:
    own_task(name="mgsm_0shot")
    with pytest.raises(PipelineError, match="own.yaml: the name mgsm_0shot exists already"):
        load("mgsm_0shot")


def test_a_task_without_data_is_refused() -> None:
    own_task()
    text = Path("tasks/own.yaml").read_text().replace("dataset_path: json\n", "")
    Path("tasks/own.yaml").write_text(text)
    with pytest.raises(PipelineError, match="The data of own_.* cannot be read .* task file"):
        load()


def test_a_group_that_names_itself_is_refused() -> None:
    own_task()
    Path("tasks/group.yaml").write_text("group: loop\ntask: [loop]\n")
    for name, part in (("one", "other"), ("other", "one")):
        Path(f"tasks/{name}.yaml").write_text(f"group: {name}\ntask: [{part}]\n")
    with pytest.raises(PipelineError, match="The group loop is a part of itself"):
        load("loop")
    with pytest.raises(PipelineError, match="The group (one|other) is a part of itself"):
        load("one")


def test_consent_to_python_is_no_consent_to_templates() -> None:
    own_task(doc_to_text=CYCLER)
    with pytest.raises(PipelineError, match="doc_to_text is refused by the sandbox"):
        load(run_code=True)


@pytest.mark.parametrize(
    "tag",
    ["%TAG !e! !func\n---\n{}doc_to_text: !e!tion own.f\n", "{}doc_to_text: !<!function> own.f\n"],
)
def test_a_function_by_another_spelling_is_one(tag: str) -> None:
    own_task()
    Path("tasks/own.py").write_text(f"import os\n{SHELL}\n")
    Path("tasks/own.yaml").write_text(
        tag.format(yaml.safe_dump({"task": "own", **OWN, "doc_to_text": None}))
    )
    with pytest.raises(PipelineError, match="could run code: own.yaml has !function"):
        load()


@pytest.mark.parametrize("name", ["../x", ".x", "a/b", "m" * 300])
def test_a_task_whose_name_is_no_file_name_is_refused(name: str) -> None:
    own_task(name)
    with pytest.raises(PipelineError, match="cannot name a task, because files are named after it"):
        load(name)


def test_files_that_include_each_other_twice_are_refused_before_they_are_read() -> None:
    """A file that is read at each way to it would be read 2^30 times.

    The harness refuses it, too.
    """
    own_task(include=["part0.yaml", "part0.yaml"])
    for number in range(31):
        Path(f"tasks/part{number}.yaml").write_text(
            f"include: [part{number + 1}.yaml, part{number + 1}.yaml]\n"
        )
    Path("tasks/part31.yaml").write_text("num_fewshot: 3\n")
    with pytest.raises(
        PipelineError, match="part31.yaml includes itself or is included twice. Remove"
    ):
        load()
    with pytest.raises(
        PipelineError, match="part31.yaml includes itself or is included twice. Remove"
    ):
        read_task(Path("tasks/own.yaml"))


def test_patterns_of_task_files_take_linear_time() -> None:
    """Quadratic ones took minutes of these."""
    blanks = "task: a" + " " * 200_000 + "b'x"
    with time_limit(2, "the search is not linear"):
        assert NAMED["task"].search(blanks) is None
    named = NAMED["task"].search("group: g\ntask: 'two words'  # a comment\n")
    assert named and named[1] == "two words"


def test_a_task_file_of_more_than_a_megabyte_is_refused() -> None:
    own_task(description="x" * 1_000_001)
    with pytest.raises(
        PipelineError, match="own.yaml has .* bytes, more than 1,000,000. Use a smaller file"
    ):
        load()


def test_an_honest_task_file_is_read() -> None:
    own_task(doc_to_text="{{q|regex_replace('[?]', '')}} ____", metadata={"version": 2})
    assert load().doc_to_text({"q": "4?", "a": "4"}) == "4 ____"


def test_templates_of_the_harness_are_rendered_as_by_plain_jinja() -> None:
    """Each template of one in fifty files of the harness, with a text for each of its variables."""
    plain = Environment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
    plain.filters["regex_replace"] = regex_replace
    files = sorted(
        path for path in Path(HARNESS).rglob("*") if path.suffix in ("", ".yaml") and path.is_file()
    )
    texts = {text for file in files[::50] for text in strings_in(load_plain(file)) if "{" in text}
    rendered = 0
    for text in sorted(texts):
        try:
            names = meta.find_undeclared_variables(plain.parse(text))
        except TemplateSyntaxError:
            continue
        doc = {name: f"{name} is 12\n" for name in names}
        try:
            expected = plain.from_string(text).render(**doc)
        except Exception as error:
            with pytest.raises(type(error)):
                render(text, doc)
            continue
        assert render(text, doc) == expected
        rendered += 1
    assert rendered > 30


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ 20000000000 * 'a' }}", "it repeats a text too often"),
        ("{{ [1] * 6000000000 }}", "it repeats a text too often"),
        ("{{ 9**(9**9) }}", "it computes a number of too many digits"),
        ("{{ 'a'|center(4000000000) }}", "it repeats a text too often"),
        ("{{ 'a'.ljust(4000000000) }}", "it repeats a text too often"),
        ("{{ '%4000000000d' % 1 }}", "it repeats a text too often"),
        ("{{ '{:>4000000000}'.format(1) }}", "it repeats a text too often"),
        (
            "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
            "takes more than",
        ),
    ],
)
def test_a_chat_template_is_bounded(
    template: str, why: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.sandbox.SECONDS", 0.2)
    tokenizer = load_tokenizer(tiny)
    with pytest.raises(Exception, match=why):
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], chat_template=template, tokenize=False
        )


def test_usual_widths_and_numbers_of_a_template_are_computed() -> None:
    template = (
        "{{ 'ab'|center(6) }}{{ '%3d %s' % (7, 20000000) }}{{ '{:>3}'.format(8) }}{{ 2**10 %"
        " 1000 }}"
    )
    assert render(template, {}) == "  ab    7 20000000  824"


def test_a_power_in_a_task_file_is_refused_before_it_is_computed() -> None:
    own_task(doc_to_text="{{q}}{{ 9**(9**9) }}")
    with pytest.raises(PipelineError, match="own.yaml: doc_to_text is refused .*too many digits"):
        load()


def test_a_config_that_names_kernels_of_the_hub_is_refused(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(
        json.dumps({**config, "_attn_implementation": "someone/kernel"})
    )
    with pytest.raises(
        PipelineError, match=r"names code on the Hub \(_attn_implementation=someone/kernel\)"
    ):
        load_config(tiny)


def test_a_limit_inside_of_a_limit_ends_neither() -> None:
    with pytest.raises(PipelineError, match="outer"), time_limit(0.2, "outer"):
        for _ in range(10**9):
            with time_limit(5, "inner"):
                os.getpid()
    with pytest.raises(PipelineError, match="pattern"), time_limit(0.2, "pattern"):
        re.match(r"(a+)+$", "a" * 60 + "b")


def test_a_link_to_a_task_file_includes_what_its_target_does() -> None:
    """The harness resolves a link before it reads `include`.

    So does the check, which looked beside the link.
    """
    own_task()
    Path("tasks/own.yaml").unlink()
    Path("tasks/sub").mkdir()
    body = yaml.safe_dump({"task": "own", **OWN, "include": "inc.yml"})
    Path("tasks/sub/b.yml").write_text(body)
    Path("tasks/inc.yml").write_text("description: harmless\n")
    Path("tasks/sub/inc.yml").write_text("process_docs: !function evil.f\n")
    Path("tasks/sub/evil.py").write_text(f"import os\n{SHELL}\ndef f(rows):\n    return rows\n")
    Path("tasks/own.yaml").symlink_to("sub/b.yml")
    with pytest.raises(PipelineError, match="could run code: inc.yml has !function"):
        load()


@pytest.mark.parametrize(
    ("place", "entry"),
    [
        ("every", {"eval.run_code": True}),
        ("every", {"eval": {"run_code": True}}),
        (
            "methods",
            {"theirs": {"merge": "mergekit", "file": "./r.yaml", "mergekit_python": "./evil.sh"}},
        ),
    ],
)
def test_a_study_gives_itself_no_consent(place: str, entry: dict[str, Any]) -> None:
    """Another person's study neither allows code nor names a program.

    The command line alone does.
    """
    study = {
        "base": "./b",
        "experts": {"math": "./m", "sw": "./s"},
        "languages": ["sw"],
        "benchmarks": ["mgsm_0shot"],
    }
    text = yaml.safe_dump({"methods": ["soup"], **study, place: entry})
    with pytest.raises(
        PipelineError, match="lets code run, which no table may. Give every.*=VALUE in the command"
    ):
        read_table(text, "s.yaml", lambda name: ("", name), {})
    if place == "every":
        plain = yaml.safe_dump({"methods": ["soup"], **study})
        assert read_table(plain, "s.yaml", lambda name: ("", name), {"eval.run_code": True}).every[
            "eval.run_code"
        ]


def test_a_file_of_the_working_directory_stands_for_no_library() -> None:
    for name in ("yaml", "blake3", "hydra", "omegaconf"):
        Path(f"{name}.py").write_text(f"import os\n{SHELL}\n")
    Path("runs").mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "pipeline", "stage=status"], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("value", ["a/b", {"": "a/b"}, [{"x": ["a/b"]}]])
def test_compiled_kernels_of_the_hub_are_refused_in_any_form(value: Any) -> None:
    Path("config.json").write_text(
        json.dumps({"model_type": "llama", "attn_implementation": value})
    )
    with pytest.raises(PipelineError, match="names code on the Hub"):
        load_config(Path())


@pytest.mark.parametrize(
    "named", ["/etc/hostname", "../../outside.jsonl", "~/x.jsonl", "file:///etc/hostname"]
)
def test_a_card_of_rows_names_no_file_outside(named: str, tmp_path: Path) -> None:
    card = "---\nconfigs: [{{config_name: default, data_files: '{}'}}]\n---\n"
    (tmp_path / "README.md").write_text(card.format(named))
    with pytest.raises(PipelineError, match="names rows outside of its folder"):
        refuse_card(tmp_path)
    (tmp_path / "README.md").write_text(card.format("test.jsonl"))
    refuse_card(tmp_path)


@pytest.mark.parametrize("key", ["data_dir", "cache_dir"])
def test_a_home_folder_is_outside_too(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write_rows(tmp_path / "home/.ssh/test.jsonl", [{"q": "1?", "a": "1"}])
    own_task(dataset_kwargs={**OWN["dataset_kwargs"], key: "~/.ssh"})  # type: ignore[dict-item]
    with pytest.raises(PipelineError, match="own reads rows of the folder ~/.ssh"):
        load()


def test_a_linked_file_of_a_model_is_not_copied_into_a_merge(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/vocab.txt").symlink_to("../secret")
    with pytest.raises(
        PipelineError, match="vocab.txt is a link to .*secret, outside of its model"
    ):
        refuse_link_outside(tmp_path / "model/vocab.txt")
    blobs, snapshot = tmp_path / "models--a/blobs", tmp_path / "models--a/snapshots/1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "x").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/x")
    refuse_link_outside(snapshot / "config.json")


def test_a_task_of_the_harness_that_evaluates_answers_as_python_is_refused() -> None:
    """score_*_math gives answers to sympy's parse_expr, which calls eval."""
    with pytest.raises(PipelineError, match="runs the model's programs without a sandbox"):
        task_specs(choice(asked("prompt_robustness_math_algebra", 0)), ["en"], None, Path("work"))
