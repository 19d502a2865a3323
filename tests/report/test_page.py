"""The page: it parses, says everything, asks the network for nothing, and has the same bytes twice."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up_report import NASTY, made_up, sample, score, write_eval
from pipeline.report.tables import roles

from pipeline.errors import PipelineError
from pipeline.report.contents import CellResult, FailedRun, RunResult
from pipeline.report.runs import duration
from pipeline.report.write import write_report

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


def test_the_page(one_language, reports):
    failed = [FailedRun("ties-1f00", "merge.density <2> must be in (0, 1]")]
    first = replace(one_language.runs[0], unlike=["torch 2.12, most 2.13"], stale="scores.json was changed")
    missing = [FailedRun("slerp-2", "not made (never made)")]
    results = replace(one_language, failed=failed, missing=missing, runs=[first, *one_language.runs[1:]])
    page = Page(write_report(results, reports))
    for told in (
        "Layer swapping in the small world",
        "python -m pipeline stage=table table=sandbox",
        "6 min 52 s in all",
        "transformers 5.23.0",
        "commit 3fa9c1d2 · dirty no",
        "1 run failed",
        "1 run not made",
        "12 s",  # of an evaluation
        "1 min 35 s",  # of a training
        "base-1",  # what it started from
        "stale: scores.json was changed",
        "merge.density <2> must be in (0, 1]",
        "torch 2.12, most 2.13",
        "MGSM qac",
    ):
        assert told in page.text, told
    assert len(page.ids) == len(set(page.ids))
    assert all(a.startswith(("#", "../", "data:,")) for a in page.addresses)
    for cell in results.cells:  # links lead to the runs
        address = f"../../{cell.name}/"
        assert address in page.addresses and (reports / address).is_dir()
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption") and tags.count("svg") == 2
    assert all("scope" in attrs for tag, attrs in page.tags if tag == "th")
    assert all(attrs.get("aria-label") for tag, attrs in page.tags if tag == "svg")
    assert "⟲ stale" in page.text and "≠" in page.text
    assert sorted(p.name for p in (reports / "plots").iterdir()) == ["scores_qac.svg", "trainings.svg"]


def test_no_request_leaves_the_page(one_language, reports):
    html = write_report(one_language, reports).read_text()
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttp|<iframe|<img|<script src", html)
    spaces = {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }  # names of namespaces, never asked for
    assert set(re.findall(r"https?://[^\s\"'<>]+", html)) <= spaces


def test_same_results_same_bytes(one_language, reports):
    def bytes_of(folder):
        return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    write_report(one_language, reports)
    first = bytes_of(reports)
    (reports / "plots" / "scores_old.svg").write_bytes(b"")
    write_report(one_language, reports)
    assert bytes_of(reports) == first
    write_report(one_language, reports.parent / "beside")
    assert bytes_of(reports.parent / "beside") == first


def test_every_generation_is_there_and_harmless(tmp_path, reports):
    lines = [sample(doc, NASTY + str(doc), doc % 2 == 0, prompt=NASTY * 3, target=NASTY) for doc in range(31)]
    folder = write_eval(tmp_path / "runs" / "e", [score("mgsm", 0.5, 31, "qac")], {"mgsm.qac": lines[::-1]})
    cell = CellResult(NASTY, "qac", 0, "e", folder)
    results = made_up(tmp_path / "runs" / "x", ["qac"], [])
    results = replace(results, seeds=[0], rows=[NASTY], title=NASTY, failed=[FailedRun(NASTY, NASTY)], cells=[cell])
    path = write_report(results, reports)
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
            "response": data["strings"][response],
            "correct": correct,
        }
        for doc, prompt, target, response, _, correct, _ in cell["items"]
    ]
    assert shown == [
        {key: line[key] for key in ("doc_id", "prompt", "target", "response", "correct")} for line in lines
    ]


def test_maps_of_an_analysis_read_at_any_scale(one_language, reports):
    """The relative norm with two digits that count, on its own scale; the published share with three."""
    folder = one_language.runs[0].folder.parent / "analyze-1"
    folder.mkdir()
    (folder / "facts.json").write_text(json.dumps(
        {"checkpoint": {"name": "math-1", "threshold": 1e-5, "dtype": "F32", "optimizer": "adamw"}}
    ))  # fmt: skip
    head = "expert,layer,column,parameter,mean,share,norm,relative,same\n"
    lines = [f"math-1,{layer},attention.wq,p{layer},0,0.25,0,{1.5e-6 * (layer + 1)},0\n" for layer in range(2)]
    (folder / "delta.csv").write_text(head + "".join(lines) + "math-1,,norm,norm,0,0,0,nan,0\n")
    analysis = RunResult("analyze-1", "analyze", folder)
    page = Page(write_report(replace(one_language, runs=[*one_language.runs, analysis]), reports))
    for told in ("What training changed", "1.5e-06", "3e-06", "0.250", "rows above 1e-05", "the greener, the more"):
        assert told in page.text, told
    (folder / "delta.csv").write_text("nothing")
    with pytest.raises(PipelineError, match="delta.csv of analyze-1 cannot be read: make it again with redo=true"):
        write_report(replace(one_language, runs=[analysis]), reports)


def test_three_languages_and_seeds(tmp_path, reports):
    results = made_up(tmp_path / "runs", ["qaa", "qab", "qac"], [0, 1, 2], n=20)
    page = Page(write_report(results, reports))
    names = ["scores_average.svg", "scores_qaa.svg", "scores_qab.svg", "scores_qac.svg", "trainings.svg"]
    assert sorted(p.name for p in (reports / "plots").iterdir()) == names
    assert len(page.ids) == len(set(page.ids)) and "Average over languages" in page.text


def test_roles_and_durations():
    assert roles(["base", "math expert", "soup", "x"], {"x": "expert"}) == {
        "base": "base",
        "math expert": "expert",
        "soup": "merge",
        "x": "expert",
    }
    assert [duration(s) for s in (1.26, 42, 412, 7260)] == ["1.3 s", "42 s", "6 min 52 s", "2 h 1 min"]
