"""What is wrong with the data or the request is found before anything heavy is imported."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_up import asked, choice, problem, write_rows

from pipeline.errors import PipelineError
from pipeline.evaluate.tasks import task_specs
from pipeline.files import ADDED_CONF


def build(
    data_root: Path | None,
    folder: Path,
    *tasks: Any,
    languages: tuple[str, ...] = ("qac",),
    left_out: Any = None,
    **kwargs: Any,
) -> Any:
    return task_specs(choice(*tasks, **kwargs), languages, data_root, folder, left_out)


def test_only_the_place_of_the_data_the_order_and_the_length_differ_from_the_stock_task(
    data_root: Path, tmp_path: Path
) -> None:
    (one,) = build(data_root, tmp_path, asked("mgsm", 2))
    body = yaml.safe_load(one.file.read_text())
    stock = Path(body["include"][0])
    assert stock.name == "mgsm_native_cot_en.yaml"
    assert set(body) == {"task", "num_fewshot", "include", "dataset_kwargs", "generation_kwargs"}
    changed = yaml.safe_load(stock.read_text())["generation_kwargs"] | {"max_gen_toks": 512}
    assert body["generation_kwargs"] == changed
    keys = set().union(*(yaml.safe_load(Path(file).read_text()) for file in body["include"][1:]))
    assert keys == {"fewshot_config", "generation_kwargs", "dataset_path", "dataset_name"}


@pytest.mark.parametrize(
    ("task", "languages", "message"),
    [
        (asked("mgms", 0), ("en",), "The task 'mgms' is unknown. Did you mean mgsm"),
        (asked("mgsm", 0), ("swa",), "unknown language 'swa': did you mean sw"),
        (asked("mgsm", 0), ("sw",), "data_root=.*/data has no mgsm/sw/test.jsonl. Put it there"),
        (asked("mgsm", 0), ("qaz",), "has no mgsm/qaz/test.jsonl"),
        (asked("flores", 0), ("en",), "another language"),
        (asked("global_mmlu", 0), ("th",), "has no global_mmlu/th/test.jsonl. Put it there"),
        (asked("mgsm", 0), ("it",), "data_root=.*/data has no mgsm/it/test.jsonl. Put it there"),
    ],
)
def test_a_wrong_request_is_refused(
    data_root: Path, tmp_path: Path, task: Any, languages: tuple[str, ...], message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        build(data_root, tmp_path / "tasks", task, languages=languages)


@pytest.mark.parametrize(
    ("folder", "english"), [("belebele", "belebele_eng_Latn"), ("global_mmlu/full", "_en_template")]
)
def test_prompts_of_these_benchmarks_differ_in_the_rows_alone(folder: str, english: str) -> None:
    """Why English's file serves a language that has none.

    All stock files say the same but the rows.
    """
    import lm_eval

    files = sorted((Path(lm_eval.__file__).parent / "tasks" / folder).glob("**/*"))
    place = {"dataset_name", "task", "test_split", "fewshot_split", "include"}
    pattern = "belebele_*_*.yaml" if folder == "belebele" else "_*_template_yaml"
    said = {}
    for file in (one for one in files if one.match(pattern)):
        text = {
            key: value
            for key, value in yaml.safe_load(file.read_text()).items()
            if key not in place
        }
        said[file.name] = text
    assert len(said) > 40 and any(english in name for name in said)
    assert len({json.dumps(text, sort_keys=True) for text in said.values()}) == 1


def test_a_language_that_the_harness_has_not_is_asked_in_its_own_rows(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Belebele, Global MMLU and MGSM by English's files."""
    (tmp_path / "language").mkdir()
    file = tmp_path / "language/kpz.yaml"
    file.write_text("name: Kupsabiny\nflores: kpz_Latn\nscripts: [LATIN]\n")
    monkeypatch.setenv(ADDED_CONF, str(tmp_path))
    for benchmark in ("belebele", "global_mmlu", "mgsm"):
        shutil.copytree(
            data_root / benchmark / "qac", data_root / benchmark / "kpz", dirs_exist_ok=True
        )
    found = build(
        data_root, tmp_path, asked("belebele", 0), asked("global_mmlu", 2), languages=("kpz",)
    )
    kinds = [Path(yaml.safe_load(one.file.read_text())["include"][0]).name for one in found]
    assert kinds == ["belebele_eng_Latn.yaml", "_en_template_yaml"]
    for task in ("mgsm", "mgsm_direct"):
        with pytest.raises(
            PipelineError,
            match=f"no {task} in Kupsabiny.*, or give data_root with mgsm/kpz/test.js",
        ):
            build(None, tmp_path, asked(task, 2), languages=("kpz",))
    with pytest.raises(PipelineError, match="give data_root with belebele/kpz/test.jsonl"):
        build(None, tmp_path, asked("belebele", 0), languages=("kpz",))
    (one,) = build(data_root, tmp_path, asked("mgsm", 2), languages=("kpz",))
    body = yaml.safe_load(one.file.read_text())
    assert "mgsm_native_cot_en" in body["include"][0] and "mgsm/kpz" in str(body["dataset_kwargs"])


def test_a_bundle_says_what_it_could_not_have(data_root: Path, tmp_path: Path) -> None:
    left_out: list[Any] = []
    tasks = asked("mgsm", 2), asked("mbpp", 0, where_possible=True)
    found = build(data_root, tmp_path / "tasks", *tasks, languages=("en", "qac"), left_out=left_out)
    assert [one.name for one in found] == ["mgsm_en_2shot", "mgsm_qac_2shot"]
    assert [(one.task, one.language, one.num_fewshot) for one in left_out] == [
        ("mbpp", "en", 0),
        ("mbpp", "qac", 0),
    ]
    assert "eval.run_code=true" in left_out[0].reason
    left_out.clear()
    write_rows(data_root / "mbpp/qac/test.jsonl", [problem(0)])
    found = build(
        data_root,
        tmp_path / "tasks",
        *tasks,
        languages=("en", "qac"),
        left_out=left_out,
        run_code=True,
    )
    assert "mbpp_qac_0shot" in [one.name for one in found]
    assert [one.language for one in left_out] == ["en"] and "mbpp/en/test.jsonl" in left_out[
        0
    ].reason
    with pytest.raises(
        PipelineError, match="Allow it with eval.run_code=true"
    ):  # asked for by itself
        build(data_root, tmp_path / "tasks", asked("mbpp", 0))


@pytest.mark.parametrize("form", ["FLORES+", "plain"])
def test_flores_in_every_form_is_the_same_rows(data_root: Path, tmp_path: Path, form: str) -> None:
    build(data_root, tmp_path / "one", asked("flores", 1))
    for split in ("dev", "devtest"):
        for code in ("en", "qac"):
            file = data_root / f"flores/{code}/{split}.jsonl"
            rows = sorted(
                (json.loads(line) for line in file.read_text().splitlines()),
                key=lambda row: row["id"],
            )
            file.unlink()
            if form == "FLORES+":
                write_rows(
                    file,
                    [{"id": row["id"], "iso_639_3": "x", "text": row["sentence"]} for row in rows],
                )
                continue
            plain = file.with_suffix(".txt")
            plain.write_text("".join(row["sentence"] + "\n" for row in rows))
    build(data_root, tmp_path / "two", asked("flores", 1))
    for name in ("flores.en-qac.test.jsonl", "flores.qac-en.dev.jsonl"):
        lines = [
            sorted(
                row["source"] + row["target"]
                for row in map(json.loads, (tmp_path / folder / name).open())
            )
            for folder in ("one", "two")
        ]
        assert lines[0] == lines[1] and len(lines[0]) == 6


def test_flores_as_plain_text_is_joined_by_the_numbers_of_lines(
    data_root: Path, tmp_path: Path
) -> None:
    """A blank line in both languages is no sentence.

    One in each at different places would shift the pairs between.
    """
    texts = {"en": ["one", "two", "", "four", "five"], "qac": ["moja", "mbili", "", "nne", "tano"]}

    def write(code: str) -> None:
        (data_root / f"flores/{code}/devtest.jsonl").unlink(missing_ok=True)
        (data_root / f"flores/{code}/devtest.txt").write_text("\n".join(texts[code]) + "\n\n")

    for code in ("en", "qac"):
        write(code)
    build(data_root, tmp_path / "tasks", asked("flores", 0))
    rows = map(json.loads, (tmp_path / "tasks/flores.en-qac.test.jsonl").open())
    assert [(row["source"], row["target"]) for row in rows] == [
        ("one", "moja"),
        ("two", "mbili"),
        ("four", "nne"),
        ("five", "tano"),
    ]
    texts["qac"] = ["moja", "mbili", "tatu", "", "tano"]
    write("qac")
    with pytest.raises(
        PipelineError,
        match="have different ids, for example 3 .*the number of a line that is not blank",
    ):
        build(data_root, tmp_path / "tasks", asked("flores", 0))


def change(file: Path, number: int, **values: Any) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[number] |= values
    write_rows(
        file, [{key: value for key, value in row.items() if value != "absent"} for row in rows]
    )


@pytest.mark.parametrize(
    ("task", "file", "values", "message"),
    [
        (
            "mgsm",
            "mgsm/qac/test.jsonl",
            {"question": "absent"},
            "has no column 'question', but answer, answer_number, ",
        ),
        (
            "mgsm",
            "mgsm/qac/test.jsonl",
            {"answer": "14"},
            "line 3: answer must be one of None, got '14'",
        ),
        (
            "mgsm",
            "mgsm/qac/test.jsonl",
            {"answer_number": "14"},
            "answer_number must be of type int",
        ),
        (
            "mgsm",
            "mgsm/qac/train.jsonl",
            {"answer": "So 4."},
            "example 3 must begin with 'Step-by-Step Answer:'",
        ),
        (
            "belebele",
            "belebele/qac/test.jsonl",
            {"correct_answer_num": "5"},
            "must be one of 1, 2, 3, 4, got '5'",
        ),
        (
            "belebele",
            "belebele/qac/test.jsonl",
            {"mc_answer2": 7},
            "mc_answer2 must be of type str",
        ),
        (
            "global_mmlu",
            "global_mmlu/qac/test.jsonl",
            {"answer": "absent"},
            "no column 'answer'",
        ),
        ("global_mmlu", "global_mmlu/qac/dev.jsonl", {"subject": "absent"}, "no column 'subject'"),
        (
            "flores",
            "flores/qac/devtest.jsonl",
            {"id": 77},
            "devtest of en and qac have different ids, for example 3",
        ),
        ("flores", "flores/qac/devtest.jsonl", {"id": 0}, "has an id twice"),
    ],
)
def test_a_wrong_row_is_refused(
    data_root: Path, tmp_path: Path, task: str, file: str, values: Any, message: str
) -> None:
    change(data_root / file, 2, **values)
    with pytest.raises(PipelineError, match=message):
        build(data_root, tmp_path / "tasks", asked(task, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b'{"question": ', "line 1 is not JSON"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"[1]", "line 1 is a list, not a row"),
        (
            b'\xef\xbb\xbf{"question": "1"}',
            "line 1 is not JSON .*Write one JSON object a line, in UTF-8 without",
        ),
    ],
)
def test_a_broken_file_is_refused(
    data_root: Path, tmp_path: Path, text: bytes, message: str
) -> None:
    (data_root / "mgsm/qac/test.jsonl").write_bytes(text)
    with pytest.raises(PipelineError, match=message):
        build(data_root, tmp_path / "tasks", asked("mgsm", 1))


def test_checking_imports_nothing_heavy() -> None:
    code = "import sys; import pipeline.evaluate.tasks; print([m for m in sys.modules if m in "
    code += "('torch', 'transformers', 'datasets', 'lm_eval', 'sacrebleu')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
