"""The table as text: exact for small made-up results, and nothing missing is dropped."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
from made_up_report import made_up, score, write_eval
from pipeline.report.tables import tabulate

from pipeline.errors import PipelineError
from pipeline.report.beside import SHARES, beside
from pipeline.report.cells import BEST_NOTE, cells_markdown, difference, outside
from pipeline.report.contents import CellResult, FailedRun, Results, TableCell
from pipeline.report.scores import load, read_all
from pipeline.report.write import write_report


def results(languages, seeds, rows, cells, **more):
    made = Results("t", "T", "", "python -m pipeline", languages, seeds, rows, cells, seconds=1.0)
    return replace(made, **more)


def cell(tmp_path, row, language, seed, rows, name=None):
    name = name or f"{row}-{language}-{seed}"
    folder = tmp_path / "runs" / name
    if not folder.exists():
        write_eval(folder, rows)
    return CellResult(row, language, seed, name, folder)


def test_one_seed_exactly(tmp_path):
    base = [
        score("mgsm", 0.25, 100, "qac"),
        score("mgsm", 0.125, 100, "qac", filter="strict-match"),
        score("belebele", 0.5, 64, "qac"),
    ]
    swap = [
        score("mgsm", 0.5, 100, "qac"),
        score("mgsm", 0.8, 100, "en"),
        score("flores", 43.25, 50, "qac", "qac-en", stderr="N/A"),
    ]
    swap.append(score("flores", 9.0, 50, "qac", "qac-en", metric="bleu"))
    cells = [cell(tmp_path, "layer swap", "qac", 0, swap), cell(tmp_path, "base", "qac", 0, base)]
    page = write_report(
        results(["qac"], [0], ["base", "layer swap", "a|b"], cells, failed=[FailedRun("x", "why")]),
        tmp_path / "r",
    )
    assert page == tmp_path / "r" / "index.html"
    assert (
        (tmp_path / "r" / "table.md").read_text()
        == """\
# T

No two models have answers to compare.

|  | MGSM qac | MGSM en | Belebele qac | FLORES qac-en |
|---|---:|---:|---:|---:|
| base | 25.0 ± 4.3 | — | 50.0 ± 6.2 | — |
| layer swap | 50.0 ± 5.0 | 80.0 ± 4.0 | — | 43.2 |
| a\\|b | — | — | — | — |

MGSM: exact match, flexible-extract, 0-shot, n = 100 each; Belebele: accuracy, 0-shot, n = 64; \
FLORES: chrF++, 0-shot, n = 50.

Seed 0. Percent; chrF++ as it is. ± is one standard error over the questions, where the harness gives it.

Seed variance is not included in intervals and p: that takes at least three seeds.

Missing:

- base, MGSM en, FLORES qac-en: its evaluation holds no such score.
- layer swap, Belebele qac: its evaluation holds no such score.
- a|b, everything: no finished evaluation (see the failed runs).

Failed runs:

- x: why
"""
    )
    assert (tmp_path / "r" / "table.csv").read_text() == (
        "row,MGSM qac,MGSM en,Belebele qac,FLORES qac-en\n"
        "base,25.0 ± 4.3,—,50.0 ± 6.2,—\n"
        "layer swap,50.0 ± 5.0,80.0 ± 4.0,—,43.2\n"
        "a|b,—,—,—,—\n"
    )
    scores = json.loads((tmp_path / "r" / "scores.json").read_text())
    assert len(scores) == 7  # strict-match and BLEU too
    assert scores == sorted(scores, key=lambda s: (s["row"], s["language"], s["seed"], s["task"]))
    assert {s["stderr"] for s in scores if s["task"] == "flores" and s["metric"] == "chrf++"} == {None}
    wanted = {"row", "language", "seed", "task", "metric", "value", "stderr", "n", "eval"}
    assert all(wanted <= set(s) for s in scores)


def test_seeds_and_languages_exactly(tmp_path):
    """The base serves every seed; one seed of one language is missing; languages are averaged within a seed."""
    both = [score("mgsm", 0.25, 100, "qaa"), score("mgsm", 0.35, 100, "qab"), score("mgsm", 0.9, 100, "en")]
    cells = [cell(tmp_path, "base", language, seed, both, "base") for language in ("qaa", "qab") for seed in (0, 1, 2)]
    values = {"qaa": (0.40, 0.50, 0.60), "qab": (0.50, 0.70, None)}
    for language, three in values.items():
        for seed, value in enumerate(three):
            if value is not None:
                cells.append(cell(tmp_path, "swap", language, seed, [score("mgsm", value, 100, language)]))
    write_report(results(["qaa", "qab"], [0, 1, 2], ["base", "swap"], cells), tmp_path / "r")
    assert (tmp_path / "r" / "table.csv").read_text() == (
        "row,MGSM average,MGSM en average,MGSM qaa,MGSM en (qaa),MGSM qab,MGSM en (qab)\n"
        "base,30.0†,90.0†,25.0 ± 4.3†,90.0 ± 3.0†,35.0 ± 4.8†,90.0 ± 3.0†\n"
        # 40, 50, 60: sd 10; 50, 70: sd 14.1; averages 45 and 60: 52.5, sd 10.6
        "swap,52.5 ± 10.6 (2/3),—,50.0 ± 10.0,—,60.0 ± 14.1 (2/3),—\n"
    )
    text = (tmp_path / "r" / "table.md").read_text()
    assert text.index("## Average over languages") < text.index("## qaa") < text.index("## qab")
    assert "- swap, MGSM qab: without seed 2.\n" in text
    assert "- swap, MGSM en (qaa), MGSM en (qab): its evaluation holds no such score.\n" in text
    assert "Seeds 0, 1, 2. Percent; chrF++ as it is. Mean ± standard deviation over seeds." in text


def test_what_stands_beside_a_math_score(tmp_path):
    """Means over seeds in percent; the unparsed of the last number is another filter's; what is not there is a dash."""
    share = {"metric": "no_equation", "filter": "none"}
    cells = []
    for seed, value in ((0, 0.25), (1, 0.75)):
        rows = [score("mgsm", 0.5, 4, "qac"), score("mgsm", value, 4, "qac", **share)]
        rows += [score("mgsm", 0.5, 4, "qac", metric="unparsed"), score("mgsm", 0.125, 4, "qac", metric="unparsed")]
        rows[-1]["filter"] = "last-number"
        cells.append(cell(tmp_path, "swap", "qac", seed, rows))
    read = results(["qac"], [0, 1], ["swap"], cells)
    scores, problems = load(read, read_all(read))
    (block,) = beside(tabulate(read, scores, problems), scores)
    shown = dict(zip(SHARES, block.rows["swap"], strict=True))
    assert block.title == "MGSM qac" and shown == dict.fromkeys(SHARES) | {"no_equation": 50.0, "unparsed": 50.0}
    page = write_report(read, tmp_path / "r").read_text()
    assert "Beside the math scores" in page and "in another language" in page


@pytest.mark.parametrize(
    "where, told_by, other, shown",
    [
        ("ny", "script", 0.0, None),  # Nyanja is written in Latin letters, as English answers are
        ("nyn", "script", 0.0, None),  # Nyankole, from an archive of another machine
        ("qac", "script", 0.25, 25.0),  # in letters that are not its own
        ("bn", "script", 0.0, 0.0),  # no other language of MGSM has its script
        ("sw", "py3langid", 0.0, 0.0),
    ],
)
def test_no_answer_in_another_language_is_shown_only_where_one_would_be_seen(tmp_path, where, told_by, other, shown):
    rows = [score("mgsm", 0.5, 4, where), score("mgsm", 0.5, 4, where, metric="no_equation", filter="none")]
    rows.append(score("mgsm", other, 4, where, metric="other_language", filter=told_by))
    read = results([where], [0], ["base"], [cell(tmp_path, "base", where, 0, rows)])
    scores, problems = load(read, read_all(read))
    (block,) = beside(tabulate(read, scores, problems), scores)
    assert dict(zip(SHARES, block.rows["base"], strict=True))["other_language"] == shown


def test_the_page_says_where_seed_variance_is_not_included(tmp_path):
    one = cell(tmp_path, "base", "qac", 0, [score("mgsm", 0.5, 4, "qac")])
    for sampled in ([], ["seed"]):
        made = results(["qac"], [0, 1, 2], ["base"], [one], sampled=sampled)
        page = write_report(made, tmp_path / f"r{len(sampled)}").read_text()
        assert ("Seed variance is not included" in page) == (not sampled)


def test_a_row_chosen_by_its_scores_is_not_bold_and_not_compared(tmp_path, one_language):
    plain = write_report(one_language, tmp_path / "r").parent
    row = next(line for line in (plain / "table.md").read_text().splitlines() if line.startswith("| layer swap"))
    chosen = write_report(replace(one_language, selected=["layer swap"]), tmp_path / "r").parent
    text = (chosen / "table.md").read_text()
    assert f"{row.replace('**', '')}\n" in text
    assert "layer swap: chosen by these scores, which are too high, and never bold." in text
    scores, problems = load(one_language, read_all(one_language))
    table = tabulate(replace(one_language, selected=["layer swap"]), scores, problems)
    assert not any(line.left == "layer swap" for block in table.comparisons for line in block.lines)


def test_the_published_number_is_compared_with_the_papers_own_method():
    one = TableCell("a", "b", 45.0, 40.0, 50.0, published=47.5, maximum=48.0, base=True)
    assert difference(one) == 0.5 and not outside(one, 1.2) and outside(replace(one, published=46.5), 1.2)


def test_what_an_evaluation_did_not_write_is_missing(tmp_path):
    good = cell(tmp_path, "base", "qac", 0, [score("mgsm", 0.5, 4, "qac")])
    nan = cell(tmp_path, "nan", "qac", 0, [{**score("mgsm", 0.5, 4, "qac"), "value": float("nan")}])
    gone = replace(good, row="gone", folder=tmp_path / "nowhere", name="gone-1")
    died = replace(gone, row="died", name="died-1")
    failed = [FailedRun("died-1", "no memory")]
    page = write_report(results(["qac"], [0], ["base"], [good, nan, gone, died], failed=failed), tmp_path / "r")
    assert "2 finished, 1 failed" in page.read_text()
    text = (tmp_path / "r" / "table.md").read_text()
    assert "| gone | — |" in text and "- gone, everything: gone-1 is not made." in text
    assert "- died, everything: died-1: no memory." in text
    assert "| nan | — |" in text and "- nan, everything: the score is not a finite number." in text


def test_nothing_at_all_is_still_a_page(tmp_path):
    page = write_report(results(["qac"], [0], ["base"], [], failed=[FailedRun("sft-1", "no memory")]), tmp_path / "r")
    assert "No evaluation has finished." in page.read_text() and "no memory" in page.read_text()


def test_two_evaluations_of_one_cell_are_refused(tmp_path):
    cells = [cell(tmp_path, "base", "qac", 0, [score("mgsm", 0.5, 4, "qac")], name) for name in ("one", "two")]
    with pytest.raises(PipelineError, match="base, MGSM qac, seed 0 has two evaluations, one and two: keep one"):
        write_report(results(["qac"], [0], ["base"], cells), tmp_path / "r")


def test_shots_are_never_mixed(tmp_path):
    rows = {
        "base": [score("mgsm", 0.5, 4, "qac", num_fewshot=2)],
        "swap": [score("mgsm", 0.75, 4, "qac", num_fewshot=8)],
    }
    cells = [cell(tmp_path, row, "qac", 0, written) for row, written in rows.items()]
    write_report(results(["qac"], [0], list(rows), cells), tmp_path / "r")
    lines = (tmp_path / "r" / "table.csv").read_text().splitlines()
    assert lines[0] == 'row,"MGSM qac, 2-shot","MGSM qac, 8-shot"'
    assert lines[1:] == ["base,50.0 ± 25.0,—", "swap,—,75.0 ± 21.7"]


def test_what_a_bundle_could_not_have_is_missing_with_its_reason(tmp_path, one_language):
    cell = one_language.cells[0]
    file = cell.folder / "scores.json"
    told = json.loads(file.read_text())
    missing = score("mbpp", 0.0, 1, "qac") | {"metric": "pass_at_1", "filter": "tests"}
    missing |= {"value": None, "stderr": None, "n": 0, "reason": "mbpp has no translation"}
    average = told["rows"][0] | {"language": "ten languages", "value": 0.5, "stderr": None}
    file.write_text(json.dumps(told | {"beside": [missing, average]}))
    page = write_report(one_language, tmp_path / "report")
    text = (page.parent / "table.md").read_text()
    assert "MBPP qac" in text and f"- {cell.row}, MBPP qac: mbpp has no translation." in text
    assert "MGSM ten languages" in text
    assert "not a finite number" not in page.read_text()


def test_a_row_of_its_own_may_be_scored_with_a_chat_template(tmp_path, one_language):
    """As calibrate and unreasonable_table_a1 show it; within a row it is refused (below)."""
    for cell in one_language.cells:
        if cell.row == one_language.cells[0].row:
            file = cell.folder / "scores.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"harness": {"chat_template": True}}))
    assert write_report(one_language, tmp_path / "report").is_file()


@pytest.mark.parametrize("how", [{"backend": "vllm"}, {"chat_template": True}, {"dtype": "bfloat16"}])
def test_unlike_ways_of_scoring_never_share_a_table(tmp_path, how):
    two_seeds = made_up(tmp_path / "runs", ["qac"], [0, 1], n=40)
    file = two_seeds.cells[-1].folder / "scores.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"harness": how}))
    with pytest.raises(
        PipelineError, match=f"eval.{next(iter(how))}={next(iter(how.values()))}.* were not scored alike"
    ):
        write_report(two_seeds, tmp_path / "report")


def test_the_dtype_of_the_scores_is_on_the_page_and_in_every_row(tmp_path, one_language):
    for cell in one_language.cells:
        file = cell.folder / "scores.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"harness": {"dtype": "bfloat16"}}))
    page = write_report(one_language, tmp_path / "report")
    assert "Scored in bfloat16." in page.read_text() and "Scored in bfloat16." in (page.parent / "table.md").read_text()
    with (page.parent / "results.csv").open(encoding="utf-8") as file:
        assert {row["dtype"] for row in csv.DictReader(file)} == {"bfloat16"}


@pytest.mark.parametrize(
    ("cell", "shown", "note"),
    [
        (TableCell("a", "b", 45.2), "45.2", []),
        (TableCell("a", "b", 45.2, n=9), "45.2 (9)", ["In round brackets how many numbers a cell is made of."]),
        (
            TableCell("a", "b", 45.2, published=47.8, maximum=47.0),
            "45.2 max 47.0 [47.8]",
            ["In square brackets what the paper prints.", BEST_NOTE],
        ),
        (TableCell("a", "b", 45.2, published=44.8), "45.2 [44.8]", ["In square brackets what the paper prints."]),
        (
            TableCell("a", "b", 45.2, n=9, published=44.8),
            "45.2 (9) [44.8]",
            ["In round brackets how many numbers a cell is made of, in square brackets what the paper prints."],
        ),
    ],
)
def test_a_note_on_brackets_stands_where_cells_have_them(cell, shown, note):
    made = results([], [], [], [], table_rows=["a"], table_columns=["b"], table_cells=[cell])
    lines = cells_markdown(made).splitlines()
    assert lines[4] == f"| a | {shown} |" and [line for line in lines[5:] if line] == note
