"""The page: it parses, says everything, asks the network for nothing, and has the same bytes twice."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import NASTY, made_up, sample, score, write_eval

from pipeline.errors import PipelineError
from pipeline.report import plots, samples
from pipeline.report.page import duration, roles
from pipeline.report.tables import build

VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use"}


class Page(HTMLParser):
    """Tags must nest. Collects ids, addresses, the text outside scripts and the text of each script."""

    def __init__(self, path: Path):
        super().__init__()
        self.open, self.ids, self.addresses, self.text, self.scripts, self.tags = [], [], [], "", [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for key, value in attrs if key == "id"]
        self.addresses += [value for key, value in attrs if key in ("href", "src", "xlink:href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.text += data


@pytest.fixture
def reports(tmp_path):
    return tmp_path / "runs" / "reports" / "sandbox"


def test_the_page(one_language, reports):
    one_language["failed"] = [{"name": "ties-1f00", "reason": "merge.density <2> must be in (0, 1]"}]
    one_language["cells"][0]["manifest_warnings"] = ["torch 2.12, others 2.13"]
    page = Page(build(one_language, reports))
    for told in (
        "Layer swapping in the small world",
        "python -m pipeline stage=table table=sandbox",
        "6 min 52 s in all",
        "transformers 5.23.0",
        "commit 3fa9c1d2 · dirty no",
        "1 failed run",
        "merge.density <2> must be in (0, 1]",
        "torch 2.12, others 2.13",
        "MGSM qac",
    ):
        assert told in page.text, told
    assert len(page.ids) == len(set(page.ids))
    assert all(a.startswith(("#", "../", "data:,")) for a in page.addresses)
    for cell in one_language["cells"]:  # links lead to the runs
        address = f"../../{cell['name']}/"
        assert address in page.addresses and (reports / address).is_dir()
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption") and tags.count("svg") == 2
    assert all("scope" in attrs for tag, attrs in page.tags if tag == "th")
    assert all(attrs.get("aria-label") for tag, attrs in page.tags if tag == "svg")
    assert sum(attrs.get("class") == "best" for _, attrs in page.tags) >= 6
    assert sorted(p.name for p in (reports / "plots").iterdir()) == ["scores_qac.png", "trainings.png"]


def test_no_request_leaves_the_page(one_language, reports):
    html = build(one_language, reports).read_text()
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttp|<iframe|<img|<script src", html)
    spaces = {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }  # names of namespaces, never asked for
    assert set(re.findall(r"https?://[^\s\"'<>]+", html)) <= spaces


def test_same_results_same_bytes(one_language, reports):
    def bytes_of(folder):
        return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    build(one_language, reports)
    first = bytes_of(reports)
    (reports / "plots" / "scores_old.png").write_bytes(b"")
    build(one_language, reports)
    assert bytes_of(reports) == first
    build(one_language, reports.parent / "beside")
    assert bytes_of(reports.parent / "beside") == first


def test_every_generation_is_there_and_harmless(tmp_path, reports):
    lines = [sample(doc, NASTY + str(doc), doc % 2 == 0, prompt=NASTY * 3, target=NASTY) for doc in range(31)]
    folder = write_eval(tmp_path / "runs" / "e", [score("mgsm", 0.5, 31, "qac")], {"mgsm.qac": lines[::-1]})
    results = made_up(tmp_path / "runs" / "x", [], []) | {
        "languages": ["qac"],
        "seeds": [0],
        "row_order": [NASTY],
        "title": NASTY,
    }
    results["failed"] = [{"name": NASTY, "reason": NASTY}]
    results["cells"] = [
        {
            "row": NASTY,
            "language": "qac",
            "seed": 0,
            "eval": folder,
            "name": "e",
            "manifest_warnings": [NASTY],
        }
    ]
    path = build(results, reports)
    page = Page(path)
    assert len(page.scripts) == 2 and "<script>alert" not in path.read_text()
    data = json.loads(page.scripts[0])
    (cell,) = data["cells"]
    assert (cell["row"], cell["language"], cell["task"], cell["total"]) == (NASTY, "qac", "MGSM qac", 31)
    shown = [
        {
            "doc_id": doc,
            "prompt": data["strings"][prompt],
            "target": data["strings"][target],
            "response": response,
            "correct": correct,
        }
        for doc, prompt, target, response, _, correct, _ in cell["items"]
    ]
    assert shown == [
        {key: line[key] for key in ("doc_id", "prompt", "target", "response", "correct")} for line in lines[:30]
    ]


def test_three_languages_and_seeds(tmp_path, reports):
    results = made_up(tmp_path / "runs", ["qaa", "qab", "qac"], [0, 1, 2], n=20)
    page = Page(build(results, reports))
    names = ["scores_average.png", "scores_qaa.png", "scores_qab.png", "scores_qac.png", "trainings.png"]
    assert sorted(p.name for p in (reports / "plots").iterdir()) == names
    assert len(page.ids) == len(set(page.ids)) and "Average over languages" in page.text


def records(tmp_path, answers, task="mgsm", value=0.5, n=4):
    """Primary records and folders of rows -> responses; a response ending in 7 is right."""
    made, folders = [], {}
    for row, responses in answers.items():
        lines = [sample(doc, response, response.endswith("7")) for doc, response in enumerate(responses)]
        folders[row] = Path(write_eval(tmp_path / row, [], {f"{task}.qac": lines}))
        record = {
            "row": row,
            "target": "qac",
            "seed": 0,
            "task": task,
            "where": "qac",
            "num_fewshot": 0,
            "value": value,
        }
        made.append(record | {"n": n, "eval": row, "label": "L"})
    return made, folders


def test_paired_differences(tmp_path):
    answers = {
        "base": ["1", "2", "3", "4"],
        "math expert": ["7", "2", "3", "4"],
        "language expert": ["7", "7", "3", "4"],
        "soup": ["7", "7", "7", "7"],
    }
    primary, folders = records(tmp_path, answers)
    for record, value in zip(primary, (0, 0.25, 0.5, 1), strict=True):
        record["value"] = value
    (block,) = samples.comparisons(primary, folders, roles(list(answers), {}), ["qac"])
    assert (block["language"], block["expert"]) == ("qac", "language expert")
    base, expert = block["lines"]
    assert base == {"row": "soup", "against": "base", "n": 4, "difference": 100, "low": 100, "high": 100}
    assert (expert["row"], expert["against"], expert["difference"]) == ("soup", "language expert", 50)
    assert (expert["low"], expert["high"]) == (
        0,
        100,
    )  # four questions, two won: P(all lost) = P(all won) = 1/16


def test_sanity_marks(tmp_path):
    answers = {"base": ["a 1", "b 2"], "twin": ["a 1", "b 2"], "mute": ["", ""], "fine": ["a 7", "b 1"]}
    primary, folders = records(tmp_path, answers)
    primary[2]["value"] = 0
    marks = {(mark["row"], mark["mark"]) for mark in samples.sanity(primary, folders)}
    assert marks == {
        ("base", "identical"),
        ("twin", "identical"),
        ("mute", "exactly 0"),
        ("mute", "mostly unparsed"),
    }


@pytest.mark.parametrize(
    ("value", "wanted"), [(0.25, "at chance"), (0.33, "at chance"), (0.34, None), (0.16, "below chance")]
)
def test_chance_of_four(tmp_path, value, wanted):
    """Two standard errors of guessing over 100 questions are 2 * sqrt(0.25 * 0.75 / 100) = 0.0866."""
    primary, folders = records(tmp_path, {"base": ["A"]}, task="belebele", value=value, n=100)
    assert [mark["mark"] for mark in samples.sanity(primary, folders)] == ([wanted] if wanted else [])


def test_answers_cut_off_are_counted(tmp_path):
    lines = [sample(0, "7", True, cut_off=False), sample(1, "the answer", False, cut_off=True)]
    folder = write_eval(tmp_path / "e", [], {"mgsm.qac": lines})
    record = {"row": "r", "seed": 0, "task": "mgsm", "where": "qac", "target": "qac", "num_fewshot": 0, "eval": "e"}
    (mark,) = samples.sanity([record | {"value": 0.5, "n": 2, "label": "L"}], {"e": Path(folder)})
    assert (mark["mark"], mark["detail"]) == ("cut off", "1 of 2 answers ran out of tokens (eval.max_gen_toks)")


@pytest.mark.parametrize(
    ("task", "where", "response", "marked"),
    [
        ("mgsm", "te", "So it is seven in all", True),
        ("mgsm", "te", "కాబట్టి మొత్తం ఏడు అవుతుంది", False),
        ("mgsm_en_cot", "te", "So it is seven in all", False),
        ("mgsm_en_cot", "te", "కాబట్టి మొత్తం ఏడు అవుతుంది", True),
        ("flores", "en-ja", "the cat ate the fish", True),
        ("flores", "ja-en", "the cat ate the fish", False),
        ("mgsm", "bn", "7", False),
        ("mbpp", "te", "def add(first, second): pass", False),
    ],
)
def test_answers_in_another_script_are_marked(tmp_path, task, where, response, marked):
    lines = [sample(doc, response, True) for doc in range(3)] + [sample(3, "", False)]
    folder = write_eval(tmp_path / "e", [], {f"{task}.{where}": lines})
    record = {"row": "r", "seed": 0, "task": task, "where": where, "target": "te", "num_fewshot": 0, "eval": "e"}
    marks = samples.sanity([record | {"value": 0.5, "n": 4, "label": "L"}], {"e": Path(folder)})
    told = [mark["detail"] for mark in marks if mark["mark"] == "wrong script"]
    assert told == (["3 of 4 answers are mostly in letters of another script"] if marked else [])


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step"')
    with pytest.raises(PipelineError, match=r"log.jsonl, line 2 is not JSON"):
        samples.read_jsonl(tmp_path / "log.jsonl")


def test_plots_say_what_they_are_given():
    panel = plots.Panel("MGSM $x_1$", [23.0, None, 48.25], [4.2, None, None], chance=25)
    svg = plots.svg_of_scores(["base", "soup", "swap"], [panel], "p", 'a "label"')
    assert svg == plots.svg_of_scores(["base", "soup", "swap"], [panel], "p", 'a "label"')
    for text in (
        "MGSM $x_1$",
        "base",
        "23.0",
        "—",
        "48.2",
        "chance",
        'aria-label="a &quot;label&quot;"',
        "var(--accent",
    ):
        assert text in svg, text
    assert svg.startswith("<svg") and 'id="p-' in svg and "dc:date" not in svg


def test_long_logs_are_averaged_in_blocks():
    assert plots._thinned([(step, 2.0) for step in range(400)]) == [(step, 2.0) for step in range(400)]
    assert plots._thinned([(step, step) for step in range(800)])[:2] == [(0.5, 0.5), (2.5, 2.5)]


def test_roles_and_durations():
    assert roles(["base", "math expert", "soup", "x"], {"x": "expert"}) == {
        "base": "base",
        "math expert": "expert",
        "soup": "merge",
        "x": "expert",
    }
    assert [duration(s) for s in (1.26, 42, 412, 7260)] == ["1.3 s", "42 s", "6 min 52 s", "2 h 1 min"]
