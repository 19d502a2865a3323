"""stage=compare: pages of what lm_eval 0.4.13 wrote (logs/, without the machine's description).

lm_eval ran two tasks on eight sums and one on five others: `guesses` is its dummy model, `tiny` and
`tiny_2shot` are the base of the sandbox, the latter with --num_fewshot 2 --limit 6 --tasks sums.
"""

import csv
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

from pipeline.errors import PipelineError
from pipeline.extras.compare import CompareStage
from pipeline.extras.compare_logs import compare_logs
from pipeline.report.compare import headline_sentences
from pipeline.report.load.contents import Results
from pipeline.report.write import write_report

LOGS = Path(__file__).parent / "logs"
GUESSES, TINY, TINY_2SHOT = (
    str(LOGS / "lm_eval" / name) for name in ("guesses", "tiny", "tiny_2shot")
)


@pytest.fixture
def copies(tmp_path: Path) -> list[Path]:
    """Of the logs of two models, to be changed."""
    return [copy_of(entry, tmp_path) for entry in (GUESSES, TINY)]


def compared(*entries: str | Path) -> Results:
    return compare_logs([*map(str, entries)], "compare", "a command")


def values_in(results: Results, column: str) -> list[float | None]:
    return [results.by_place[row, column].value for row in results.rows]


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
    results = compared(GUESSES, TINY)
    generated = ["sums_gen exact_match (strict)", "sums_gen exact_match (flexible)"]
    assert results.columns == ["sums acc", "sums acc_norm", *generated, "sums_hard acc"]
    printed = [
        json.loads(only_file(folder, "results_*.json").read_text())["results"]
        for folder in (GUESSES, TINY)
    ]
    for column, key in (("sums acc", "acc,none"), ("sums acc_norm", "acc_norm,none")):
        expected = [100 * scores[column.split()[0]][key] for scores in printed]
        assert values_in(results, column) == pytest.approx(expected)
    assert len({cell.value for cell in results.cells}) > 2
    assert any(
        "bleu of sums_gen has no number for 8 of 8 items" in text
        for text in results.computed["Not compared"]
    )


def test_the_contrast_is_mcnemars_score_test() -> None:
    """Counted from the samples files; p of (b - c) / sqrt(b + c)."""
    guesses, tiny = (
        {row["doc_hash"]: row["acc"] for row in raw_samples(folder, "sums")}
        for folder in (GUESSES, TINY)
    )
    only_tiny = sum(tiny[key] > guesses[key] for key in tiny)
    only_guesses = sum(tiny[key] < guesses[key] for key in tiny)
    (line,) = (line for line in compared(GUESSES, TINY).contrasts if line["place"] == "sums acc")
    assert (line["left"], line["right"], line["n"]) == ("sandbox_base", "6v8uqx97", 8)
    assert line["difference"] == pytest.approx(100 * (only_tiny - only_guesses) / 8)
    statistic = abs(only_tiny - only_guesses) / math.sqrt(only_tiny + only_guesses)
    assert only_tiny + only_guesses and line["p"] == pytest.approx(
        math.erfc(statistic / math.sqrt(2))
    )
    assert line["low"] <= line["difference"] <= line["high"] and line["detectable"] >= 300 / 8


def test_items_are_matched_by_document_whatever_their_order(tmp_path: Path) -> None:
    straight = compared(GUESSES, TINY)
    shuffled = copy_of(TINY, tmp_path)
    for file in shuffled.rglob("samples_*.jsonl"):
        write_lines(
            file, [row | {"doc_id": 100 - row["doc_id"]} for row in reversed(lines_of(file))]
        )
    assert compared(GUESSES, shuffled).contrasts == straight.contrasts


def test_logs_of_different_items_and_settings() -> None:
    results = compared(TINY, TINY_2SHOT)
    assert results.rows == ["sandbox_base (tiny)", "sandbox_base (tiny_2shot)"]
    assert results.columns == ["sums acc", "sums acc_norm"]
    expected = [
        100 * sum(row["acc"] for row in raw_samples(folder, "sums") if row["doc_id"] < 6) / 6
        for folder in (TINY, TINY_2SHOT)
    ]
    assert values_in(results, "sums acc") == pytest.approx(expected)
    matched = (
        "sums: 6 matched items, of 8 of “sandbox_base (tiny)” and 6 of “sandbox_base (tiny_2shot)”"
    )
    assert matched in results.note and matched in results.computed["Matched items"][0]
    assert "sums: the prompts of 6 of 6 items differ." in results.note
    assert (
        "num_fewshot: 0 (“sandbox_base (tiny)”), 2 (“sandbox_base (tiny_2shot)”)." in results.note
    )
    limits = "limit: not set (“sandbox_base (tiny)”), 6.0 (“sandbox_base (tiny_2shot)”)."
    assert limits in results.computed["Different settings"]
    assert any(
        "sums_gen: only “sandbox_base (tiny)” has a log" in text
        for text in results.computed["Not compared"]
    )


def test_an_item_that_stands_in_the_data_twice_is_matched_twice(copies: list[Path]) -> None:
    for copy in copies:
        rows = raw_samples(copy, "sums")
        write_lines(only_file(copy, "samples_sums_2*"), [*rows, rows[0] | {"doc_id": 8}])
        with changed(only_file(copy, "results_*")) as content:
            del content["results"]["sums"]
    lines = compared(*copies).contrasts
    assert {line["n"] for line in lines if line["place"].startswith("sums ")} == {9}


def test_numbers_on_a_scale_of_their_own_have_students_t(
    copies: list[Path], tmp_path: Path
) -> None:
    grades = {"guesses": [1.0, 7, 3, 5, 6, 2, 9, 4], "tiny": [2.5, 8, 3, 9, 8, 1, 12, 7]}
    for copy in copies:
        graded = zip(raw_samples(copy, "sums"), grades[copy.name], strict=True)
        rows = [row | {"metrics": ["grade"], "grade": grade} for row, grade in graded]
        write_lines(only_file(copy, "samples_sums_2*"), rows)
    results = compared(*copies)
    assert values_in(results, "sums grade") == [37 / 8, 50.5 / 8]
    (line,) = (line for line in results.contrasts if line["place"] == "sums grade")
    test = ttest_rel(grades["tiny"], grades["guesses"])
    low, high = test.confidence_interval()
    assert [line["p"], line["low"], line["high"]] == pytest.approx([test.pvalue, low, high])
    assert line["difference"] == pytest.approx(13.5 / 8)
    page = write_report(results, tmp_path / "page")
    with page.with_name("results.csv").open() as file:
        assert [
            float(row["value"]) for row in csv.DictReader(file) if row["metric"] == "grade"
        ] == [37 / 8, 50.5 / 8]


def test_a_metric_that_is_no_mean_of_its_items_is_not_compared(copies: list[Path]) -> None:
    """As perplexity, the exponential of a mean."""
    for copy in copies:
        with changed(only_file(copy, "results_*")) as content:
            content["results"]["sums"]["acc,none"] = 12.5
    results = compared(*copies)
    assert "sums acc_norm" in results.columns and "sums acc" not in results.columns
    (reason,) = (
        text
        for text in results.computed["Not compared"]
        if text.startswith("acc of sums is 12.5 for")
    )
    assert "the mean of its items" in reason


def test_a_folder_with_two_models_and_results_named_by_output_path(tmp_path: Path) -> None:
    """--output_path FILE.json writes FILE_TIME.json.

    A model's own folder on a disk is not shown.
    """
    copies = [copy_of(entry, tmp_path / "all") for entry in (GUESSES, TINY)]
    file = only_file(copies[1], "results_*.json")
    with changed(file) as content:
        content["model_name"] = "/home/someone/models/mine/"
    file.rename(file.with_name(file.name.replace("results", "out")))
    results = compared(str(tmp_path / "all"))
    assert results.rows == ["6v8uqx97", "mine"]
    assert not any("someone" in text for text in results.runs[1].config.values())


def test_nothing_in_common(tmp_path: Path) -> None:
    other = copy_of(TINY, tmp_path)
    for file in other.rglob("samples_*.jsonl"):
        write_lines(file, [row | {"doc_hash": f"x{row['doc_hash']}"} for row in lines_of(file)])
    told = refusal(GUESSES, other)
    assert (
        "sums_gen: no item is in all logs. bleu of sums_gen has no number" in told
        and told.endswith("and 1 more")
    )


@pytest.mark.parametrize("pattern", ["results_*.json", "samples_sums_2*.jsonl"])
@pytest.mark.parametrize(
    "broken",
    [b"", b"{", b"[1, 2]", b'{"a": 1}\n', b"\xff\xfe{}", b"[" * 100_000, b"9" * 10_000, b"null"],
)
def test_malformed_files_of_lm_eval(pattern: str, broken: bytes, tmp_path: Path) -> None:
    copy = copy_of(TINY, tmp_path)
    file = only_file(copy, pattern)
    file.write_bytes(broken)
    told = refusal(GUESSES, copy)
    assert file.name in told or "holds no log" in told


# --- the page ---


def test_the_page_of_hostile_logs(copies: list[Path], tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>\x00\ud800\r\n<!--{{ 7*7 }}"
    for number, copy in enumerate(copies):
        with changed(only_file(copy, "results_*.json")) as content:
            content["model_name"] = content["config"]["limit"] = f"{number} {evil}"
            for key in ("results", "configs", "versions", "n-shot"):
                content[key]["..su.ms"] = content[key].pop("sums")
        file = only_file(copy, "samples_sums_2*.jsonl")
        write_lines(
            file, [row | {"target": evil, "resps": evil, "filter": evil} for row in lines_of(file)]
        )
        file.rename(copy / file.parent.name / file.name.replace("samples_sums", "samples_..su.ms"))
    page = CompareStage(
        stage="compare", results=[*map(str, copies)], runs_dir=str(tmp_path / "runs")
    ).answer()
    html = page.read_text(encoding="utf-8")
    assert "<script>alert" not in html and "alert(1)" in html and "{{ 7*7 }}" in html
    assert html.count("</script>") == 3 and "\ud800" not in html
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.html")} == {"runs"}
    with changed(only_file(copies[0], "results_*.json")) as content:
        for key in ("results", "configs", "versions", "n-shot"):
            content[key]["../su.ms"] = content[key].pop("..su.ms")
    with pytest.raises(PipelineError, match="names a samples file in another folder"):
        CompareStage(
            stage="compare", results=[*map(str, copies)], runs_dir=str(tmp_path / "runs")
        ).answer()


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
    """It prints one line and the verdict without torch and most other packages.

    The verdict is on standard error. Neither tool can be imported.
    """
    words = ["stage=compare", f"results=[{TINY},{TINY_2SHOT}]", f"runs_dir={tmp_path / 'runs'}"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *words], capture_output=True, text=True, check=True
    )
    page, status = done.stdout.splitlines()
    assert status == "0 False"
    told = (
        "None of the 2 differences is significant. Detectable with 6 questions and 80 % power: .*"
    )
    assert re.fullmatch(told, done.stderr.splitlines()[0])
    assert "num_fewshot: 0" in done.stderr
    folder = Path(page).parent
    assert folder.parent == tmp_path / "runs/reports" and folder.name.startswith("compare-")
    html = (folder / "index.html").read_text(encoding="utf-8")
    assert (
        "sandbox_base (tiny_2shot) against sandbox_base (tiny)" in html and "num_fewshot: 0" in html
    )
    with (folder / "contrasts.csv").open() as file:
        assert [row["n"] for row in csv.DictReader(file)] == ["6", "6"]
    with (folder / "results.csv").open() as file:
        assert [(row["task"], row["n"], row["num_fewshot"]) for row in csv.DictReader(file)] == [
            (task, "6", shots) for shots in ("0", "2") for task in ("sums acc", "sums acc_norm")
        ]
    import pyarrow.parquet as pq

    assert pq.read_table(folder / "answers.parquet").num_rows == 24


def test_the_matched_part_of_an_incomplete_log_is_compared(tmp_path: Path) -> None:
    """The log's own score covers all its items, so it says nothing about those that are left."""
    copy = copy_of(TINY, tmp_path)
    write_lines(only_file(copy, "samples_sums_2*"), raw_samples(copy, "sums")[:5])
    results = compared(GUESSES, copy)
    expected = [
        100 * sum(row["acc"] for row in raw_samples(folder, "sums")[:5]) / 5
        for folder in (GUESSES, TINY)
    ]
    assert values_in(results, "sums acc") == pytest.approx(expected)
    assert "holds 5 of the 8 items that were scored" in results.note


def test_of_a_metric_of_which_less_is_better_the_lower_score_is_the_better_one(
    copies: list[Path],
) -> None:
    for copy, value in zip(copies, (1.0, 0.0), strict=True):
        with changed(only_file(copy, "results_*")) as content:
            content["higher_is_better"]["sums"]["acc"] = False
            content["results"]["sums"]["acc,none"] = value
        write_lines(
            only_file(copy, "samples_sums_2*"),
            [row | {"acc": value} for row in raw_samples(copy, "sums")],
        )
    results = compared(*copies)
    column = "sums acc (lower is better)"
    assert [results.by_place[row, column].best for row in results.rows] == [False, True]
    sentences = headline_sentences(results.contrasts)
    assert any(
        f"“sandbox_base” is better than “6v8uqx97” in “{column}”: -100.0 points" in text
        for text in sentences
    )


def test_logs_in_a_folder_that_begins_with_a_dot(tmp_path: Path) -> None:
    """As lm_eval names that of pretrained=./model.

    A hidden file, such as macOS' copies, is not a log.
    """
    hidden = [
        str(shutil.copytree(entry, tmp_path / Path(entry).name / ".__model").parent)
        for entry in (GUESSES, TINY)
    ]
    for file in tmp_path.rglob("results_*.json"):
        (file.parent / f"._{file.name}").write_text("no JSON")
    assert [cell.value for cell in compared(*hidden).cells] == [
        cell.value for cell in compared(GUESSES, TINY).cells
    ]


@pytest.mark.parametrize(
    "change", [{"lm_eval_version": "0.4.7"}, {"rows": "filter"}, {"rows": "doc_hash"}]
)
def test_logs_of_versions_before_0_4_8_are_refused(
    change: dict[str, str], copies: list[Path]
) -> None:
    """By the version that the results name, or by what a row of the samples lacks."""
    file = only_file(copies[0], "results_*.json")
    with changed(file) as content:
        content["lm_eval_version"] = change.get("lm_eval_version", "0.4.13")
    if "rows" in change:
        rows = raw_samples(copies[0], "sums")
        kept = [{key: value for key, value in row.items() if key != change["rows"]} for row in rows]
        write_lines(only_file(copies[0], "samples_sums_2*"), kept)
    said = refusal(*copies)
    assert said.startswith(f"{file} is of lm_eval ") and said.endswith(
        "Score again with lm_eval 0.4.8 or later, and --log_samples."
    )


def test_model_arguments_as_they_were_typed(copies: list[Path]) -> None:
    """As lm_eval 0.4.8 and 0.4.9 record them; the model's name is in them."""
    with changed(only_file(copies[1], "results_*.json")) as content:
        del content["model_name"]
        content["config"]["model_args"] = "pretrained=org/tiny,dtype=float32"
    results = compared(*copies)
    assert results.rows == ["6v8uqx97", "org/tiny"] and results.runs[1].config["dtype"] == "float32"


def test_a_log_of_inspect_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.eval").write_bytes(b"PK")
    assert "is a log of inspect_ai, which is not read since 0.2.0" in refusal(
        tmp_path / "a.eval", TINY
    )


def test_results_of_lm_eval_before_0_4(tmp_path: Path) -> None:
    """As 0.3.0's command wrote them: nothing is known of single items."""
    config = {
        "model": "gpt2",
        "model_args": "",
        "num_fewshot": 0,
        "limit": None,
        "bootstrap_iters": 100000,
    }
    old = {
        "results": {"piqa": {"acc": 0.6, "acc_stderr": 0.01}},
        "versions": {"piqa": 0},
        "config": config,
    }
    (tmp_path / "results.json").write_text(json.dumps(old, indent=2))
    assert "results.json is of lm_eval before 0.4.8" in refusal(tmp_path / "results.json", TINY)
