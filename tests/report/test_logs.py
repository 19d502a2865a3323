"""stage=compare: what lm_eval 0.4.13 wrote (logs/, without the machine's description), and runs.

lm_eval ran two tasks on eight sums and one on five others: `guesses` is its dummy model, `tiny` and
`tiny_2shot` are the base of the sandbox, the latter with --num_fewshot 2 --limit 6 --tasks sums.
"""

import csv
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from made_up_report import sample, score, write_eval
from scipy.stats import ttest_rel

from pipeline.errors import PipelineError
from pipeline.extras.compare import CompareStage, read_logs
from pipeline.extras.compare_logs import compare_logs
from pipeline.runs.manifest import Manifest

LOGS = Path(__file__).parent / "logs"
GUESSES, TINY, TINY_2SHOT = (
    str(LOGS / "lm_eval" / name) for name in ("guesses", "tiny", "tiny_2shot")
)


@pytest.fixture
def copies(tmp_path: Path) -> list[Path]:
    """Of the logs of two models, to be changed."""
    return [copy_of(entry, tmp_path) for entry in (GUESSES, TINY)]


def compared(*entries: str | Path) -> tuple[list[dict[str, Any]], list[str]]:
    return compare_logs({str(entry): read_logs(Path(entry)) for entry in entries})


def line_of(lines: list[dict[str, Any]], task: str, metric: str) -> dict[str, Any]:
    (line,) = (line for line in lines if (line["task"], line["metric"]) == (task, metric))
    return line


def only_file(folder: str | Path, pattern: str) -> Path:
    (file,) = Path(folder).rglob(pattern)
    return file


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def raw_samples(folder: str | Path, task: str) -> list[dict[str, Any]]:
    return lines_of(only_file(folder, f"samples_{task}_2*.jsonl"))


def copy_of(entry: str, folder: Path) -> Path:
    return Path(shutil.copytree(entry, folder / Path(entry).name))


@contextmanager
def changed(file: Path) -> Iterator[Any]:
    """Its content, which is written again afterwards."""
    content = json.loads(file.read_text())
    yield content
    file.write_text(json.dumps(content))


def refusal(*entries: str | Path) -> str:
    with pytest.raises(PipelineError) as caught:
        compared(*entries)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- lm_eval ---


def test_scores_are_those_that_lm_eval_printed() -> None:
    lines, notes = compared(GUESSES, TINY)
    assert [(line["task"], line["metric"]) for line in lines] == [
        ("sums", "acc"),
        ("sums", "acc_norm"),
        ("sums_gen (strict)", "exact_match"),
        ("sums_gen (flexible)", "exact_match"),
        ("sums_hard", "acc"),
    ]
    for name, folder in (("baseline_value", GUESSES), ("value", TINY)):
        printed = json.loads(only_file(folder, "results_*.json").read_text())["results"]
        for metric in ("acc", "acc_norm"):
            line = line_of(lines, "sums", metric)
            assert line[name] == pytest.approx(100 * printed["sums"][f"{metric},none"])
    assert "not means over questions: sums_gen (strict) bleu, sums_gen (flexible) bleu" in notes[1]


def test_the_contrast_is_mcnemars_score_test() -> None:
    """Counted from the samples files; p of (b - c) / sqrt(b + c)."""
    guesses, tiny = (
        {row["doc_hash"]: row["acc"] for row in raw_samples(folder, "sums")}
        for folder in (GUESSES, TINY)
    )
    only_tiny = sum(tiny[key] > guesses[key] for key in tiny)
    only_guesses = sum(tiny[key] < guesses[key] for key in tiny)
    lines, _ = compared(GUESSES, TINY)
    line = line_of(lines, "sums", "acc")
    assert (line["model"], line["baseline"], line["questions"]) == (TINY, GUESSES, 8)
    assert line["difference"] == pytest.approx(100 * (only_tiny - only_guesses) / 8)
    statistic = abs(only_tiny - only_guesses) / math.sqrt(only_tiny + only_guesses)
    assert only_tiny + only_guesses and line["p"] == pytest.approx(
        math.erfc(statistic / math.sqrt(2))
    )
    assert line["difference_low"] <= line["difference"] <= line["difference_high"]
    assert line["p_holm"] == pytest.approx(5 * line["p"])  # the least of five


def test_items_are_matched_by_document_whatever_their_order(tmp_path: Path) -> None:
    straight, _ = compared(GUESSES, TINY)
    shuffled = copy_of(TINY, tmp_path)
    for file in shuffled.rglob("samples_*.jsonl"):
        write_lines(
            file, [row | {"doc_id": 100 - row["doc_id"]} for row in reversed(lines_of(file))]
        )
    lines, _ = compared(GUESSES, shuffled)
    expected = [line | {"model": str(shuffled)} for line in straight]
    assert lines == [pytest.approx(line) for line in expected]


def test_logs_of_different_items_and_settings() -> None:
    lines, notes = compared(TINY, TINY_2SHOT)
    line = line_of(lines, "sums", "acc")
    for name, folder in (("baseline_value", TINY), ("value", TINY_2SHOT)):
        right = sum(row["acc"] for row in raw_samples(folder, "sums") if row["doc_id"] < 6)
        assert line[name] == pytest.approx(100 * right / 6)
    assert line["questions"] == 6 and len(lines) == 2
    assert notes == ["These settings differ: num_fewshot, limit, prompts."]


def test_an_item_that_stands_in_the_data_twice_is_matched_twice(copies: list[Path]) -> None:
    for copy in copies:
        rows = raw_samples(copy, "sums")
        write_lines(only_file(copy, "samples_sums_2*"), [*rows, rows[0] | {"doc_id": 8}])
        with changed(only_file(copy, "results_*")) as content:
            del content["results"]["sums"]
    lines, _ = compared(*copies)
    assert {line["questions"] for line in lines if line["task"] == "sums"} == {9}


def test_numbers_on_a_scale_of_their_own_have_students_t(copies: list[Path]) -> None:
    grades = {"guesses": [1.0, 7, 3, 5, 6, 2, 9, 4], "tiny": [2.5, 8, 3, 9, 8, 1, 12, 7]}
    for copy in copies:
        graded = zip(raw_samples(copy, "sums"), grades[copy.name], strict=True)
        rows = [row | {"metrics": ["grade"], "grade": grade} for row, grade in graded]
        write_lines(only_file(copy, "samples_sums_2*"), rows)
    lines, _ = compared(*copies)
    line = line_of(lines, "sums", "grade")
    assert [line["baseline_value"], line["value"]] == [37 / 8, 50.5 / 8]
    test = ttest_rel(grades["tiny"], grades["guesses"])
    low, high = test.confidence_interval()
    numbers = [line["p"], line["difference_low"], line["difference_high"]]
    assert numbers == pytest.approx([test.pvalue, low, high])
    assert line["difference"] == pytest.approx(13.5 / 8)


def test_a_metric_that_is_no_mean_of_its_items_is_not_compared(copies: list[Path]) -> None:
    """As perplexity, the exponential of a mean."""
    for copy in copies:
        with changed(only_file(copy, "results_*")) as content:
            content["results"]["sums"]["acc,none"] = 12.5
    lines, notes = compared(*copies)
    of_sums = [line["metric"] for line in lines if line["task"] == "sums"]
    assert of_sums == ["acc_norm"] and "not means over questions: sums acc," in notes[1]


def test_a_folder_with_two_models_and_results_named_by_output_path(tmp_path: Path) -> None:
    """--output_path FILE.json writes FILE_TIME.json."""
    copies = [copy_of(entry, tmp_path / "all") for entry in (GUESSES, TINY)]
    file = only_file(copies[1], "results_*.json")
    renamed = file.rename(file.with_name(file.name.replace("results", "out")))
    assert "holds sums twice, in results_2026" in refusal(tmp_path / "all", GUESSES)
    lines, _ = compared(copies[0], renamed)
    assert [line["value"] for line in lines] == [line["value"] for line in compared(*copies)[0]]


def test_nothing_in_common(tmp_path: Path) -> None:
    other = copy_of(TINY, tmp_path)
    for file in other.rglob("samples_*.jsonl"):
        write_lines(file, [row | {"doc_hash": f"x{row['doc_hash']}"} for row in lines_of(file)])
    assert "share no task and metric with questions that vary" in refusal(GUESSES, other)


@pytest.mark.parametrize("pattern", ["results_*.json", "samples_sums_2*.jsonl"])
@pytest.mark.parametrize(
    "broken",
    [b"{", b"[1, 2]", b'{"a": 1}\n', b"\xff\xfe{}", b"[" * 100_000, b"9" * 10_000, b"null"],
)
def test_malformed_files_of_lm_eval(pattern: str, broken: bytes, tmp_path: Path) -> None:
    copy = copy_of(TINY, tmp_path)
    file = only_file(copy, pattern)
    file.write_bytes(broken)
    told = refusal(GUESSES, copy)
    assert f"{only_file(copy, 'results_*.json').name} cannot be read as a log" in told or (
        "holds no log" in told
    )


def test_hostile_logs(copies: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    evil = "=1+2\x1b[31m\ud800\u202e"
    for copy in copies:
        file = only_file(copy, "samples_sums_2*.jsonl")
        rows = [
            row | {"filter": evil, "metrics": [evil], evil: row["acc"]} for row in lines_of(file)
        ]
        write_lines(file, rows)
    stage = CompareStage(
        stage="compare", results=[*map(str, copies)], runs_dir=str(tmp_path / "runs")
    )
    text = stage.answer()
    assert "=1+2" in text and not any(character in text for character in "\x1b\u202e\ud800")
    written = (tmp_path / "runs/reports/compare.csv").read_text(encoding="utf-8")
    assert ",'=1+2" in written
    with changed(only_file(copies[0], "results_*.json")) as content:
        content["configs"]["../sums"] = {}
    with pytest.raises(PipelineError, match="names a file in another folder"):
        stage.answer()


WITHOUT = """
import sys
from importlib.machinery import PathFinder
MISSING = "torch transformers tokenizers safetensors datasets accelerate trl peft pandas sacrebleu lm_eval"
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in MISSING.split() else super().find_spec(name, path, target)
sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
from pipeline.__main__ import main
status = main(sys.argv[1:])
print(status, "torch" in sys.modules)
"""


def test_the_command(tmp_path: Path) -> None:
    """It prints the comparisons, without torch and most other packages."""
    words = ["stage=compare", f"results=[{TINY},{TINY_2SHOT}]", f"runs_dir={tmp_path / 'runs'}"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *words], capture_output=True, text=True, check=True
    )
    header, first, _, status = done.stdout.splitlines()
    assert status == "0 False"
    assert header.split()[:4] == ["model", "task", "metric", "questions"]
    assert first.split()[:4] == [TINY_2SHOT, "sums", "acc", "6"]
    assert "These settings differ: num_fewshot, limit, prompts." in done.stderr
    with (tmp_path / "runs/reports/compare.csv").open() as file:
        assert [row["questions"] for row in csv.DictReader(file)] == ["6", "6"]


def test_logs_in_a_folder_that_begins_with_a_dot(tmp_path: Path) -> None:
    """As lm_eval names that of pretrained=./model.

    A hidden file, such as macOS' copies, is not a log.
    """
    hidden = [
        shutil.copytree(entry, tmp_path / Path(entry).name / ".__model").parent
        for entry in (GUESSES, TINY)
    ]
    for file in tmp_path.rglob("results_*.json"):
        (file.parent / f"._{file.name}").write_text("no JSON")
    values = [line["value"] for line in compared(GUESSES, TINY)[0]]
    assert [line["value"] for line in compared(*hidden)[0]] == values


@pytest.mark.parametrize("lacking", ["filter", "doc_hash"])
def test_logs_of_versions_before_0_4_8_are_refused(lacking: str, copies: list[Path]) -> None:
    """Their samples lack some keys."""
    rows = raw_samples(copies[0], "sums")
    kept = [{key: value for key, value in row.items() if key != lacking} for row in rows]
    write_lines(only_file(copies[0], "samples_sums_2*"), kept)
    said = refusal(*copies)
    assert f"cannot be read as a log (KeyError: '{lacking}')" in said
    assert "score again with lm_eval 0.4.8 or later" in said


def test_one_model_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    stage = CompareStage(stage="compare", results=[TINY], runs_dir=str(tmp_path))
    with pytest.raises(PipelineError, match="names one model. Name the folders or files of two"):
        stage.answer()


# --- runs ---


def evaluation_of(folder: Path, right: int) -> Path:
    """Write a run that answered `right` of four questions of MGSM in Swahili."""
    answers = [
        sample(doc, f"It is {doc}", doc < right, scores={"exact_match": float(doc < right)})
        for doc in range(4)
    ]
    rows = [score("mgsm", right / 4, 4, "sw")]
    write_eval(folder, rows, {"mgsm.sw": answers})
    config = {"eval": {"name": "x"}, "languages": ["sw"]}
    Manifest(folder.name, "a" * 64, {"stage": "eval", "version": 1}, {}, config, {}).write(folder)
    return folder


def test_runs_are_compared_by_their_names(tmp_path: Path) -> None:
    one = evaluation_of(tmp_path / "runs/eval-x-sw-0123456789ab", 1)
    two = evaluation_of(tmp_path / "runs/eval-y-sw-0123456789ab", 3)
    lines, notes = compared(one, two)
    line = line_of(lines, "mgsm sw", "exact_match")
    assert (line["baseline_value"], line["value"], line["difference"]) == (25, 75, 50)
    assert line["questions"] == 4 and not notes
    stage = CompareStage(stage="compare", results=[], runs_dir=str(one.parent))
    assert stage.folder_of(one.name) == stage.folder_of("eval-x") == one
    assert stage.folder_of(str(one)) == one
    with pytest.raises(PipelineError, match="results=logs is not a finished run of .*eval-x-sw"):
        stage.folder_of("logs")
    with pytest.raises(PipelineError, match="results=logs is not a folder"):
        stage.folder_of("./logs")
    with pytest.raises(PipelineError, match="results=eval- means more than one run: "):
        stage.folder_of("eval-")


def test_another_folder_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="holds no log. Give results_"):
        read_logs(tmp_path)
