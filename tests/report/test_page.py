"""The page: it parses, says everything, needs no network, and has the same bytes twice."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from made_up_report import NASTY, results_of, sample, score, write_eval

from pipeline.progress import format_duration
from pipeline.report.load.contents import CellResult, CellScore, RunResult
from pipeline.report.write import write_report

VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use"}


class Page(HTMLParser):
    """Tags must nest.

    Collects ids, addresses, the text outside scripts, and the text of each script.
    """

    def __init__(self, path: Path):
        super().__init__()
        self.open, self.ids, self.addresses, self.text, self.scripts, self.tags = (
            [],
            [],
            [],
            "",
            [],
            [],
        )
        self.tables = []  # each a list of rows, these of the texts of their cells
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for key, value in attrs if key == "id"]
        self.addresses += [
            value
            for key, value in attrs
            if key in ("href", "src", "xlink:href", "srcset", "action")
        ]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("th", "td"):
            self.tables[-1][-1].append("")
        if tag == "li" and {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += "\n"

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.text += data
            if {"td", "th"} & set(self.open):
                self.tables[-1][-1][-1] += data


def test_the_page(one_language, reports):
    failed = {"ties-1f00": "merge.density <2> must be in (0, 1]"}
    first = replace(one_language.runs[0], stale="scores.json was changed")
    missing = {"slerp-2": "not made (never made)"}
    results = replace(
        one_language, failed=failed, missing=missing, runs=[first, *one_language.runs[1:]]
    )
    page = Page(write_report(results, reports))
    for told in (
        "Layer swapping in the small world",
        "python -m pipeline stage=table table=sandbox",
        format_duration(sum(run.seconds for run in results.runs)) + " in total",
        "transformers 5.23.0",
        "commit 3fa9c1d2 · dirty no",
        "1 run failed",
        "1 run not started",
        "12 s",  # of an evaluation
        "1:35 min",  # of a training
        "base-1",  # what it started from
        "stale: scores.json was changed",
        "merge.density <2> must be in (0, 1]",
        "flores from",
    ):
        assert told in page.text, told
    assert len(page.ids) == len(set(page.ids))
    assert all(a.startswith(("#", "data:,")) for a in page.addresses)
    for cell in results.cells:  # links lead to the runs
        assert all(
            f"#run-{name}" in page.addresses and f"run-{name}" in page.ids for name in cell.runs
        )
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption") + 1  # the answers' table is JavaScript's
    assert tags.count("svg") == 1
    assert all("scope" in attrs for tag, attrs in page.tags if tag == "th")
    assert all(attrs.get("aria-label") for tag, attrs in page.tags if tag == "svg")
    assert "⟲ stale" in page.text
    assert sorted(p.name for p in (reports / "plots").iterdir()) == ["scores.svg"]


def test_no_request_leaves_the_page(one_language, reports):
    html = write_report(one_language, reports).read_text()
    html = re.sub(
        r'<script type="application/json" id="bundle">.*?</script>', "", html
    )  # comments name sites
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttp|<iframe|<img|<script src", html)
    spaces = {
        f"http://www.w3.org/{name}" for name in ("2000/svg", "1999/xlink")
    }  # names of namespaces, never requested
    assert set(re.findall(r"https?://[^\s\"'<>]+", html)) <= spaces


def test_the_policy_of_the_page_allows_its_own_script_alone(one_language, reports):
    page = Page(write_report(one_language, reports))
    (policy,) = [
        attrs["content"]
        for _, attrs in page.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    digest = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}' blob:;" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2] and "unsafe-eval" not in policy


def test_names_mean_nothing_in_markdown(one_language, reports):
    """No link, image or code: a backslash stands before what would close the text of a link."""
    link = "[x](javascript:alert(1)) ![y](http://evil/z.png) `b`"
    results = replace(one_language, title=link, columns=[link], note=link)
    text = write_report(results, reports).with_name("cells.md").read_text()
    assert text.count("evil/z.png") == 3 and not re.search(r"(?<!\\)(\]\(|`)", text)


def test_same_results_same_bytes(one_language, reports):
    def bytes_of(folder):
        return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    first, again, beside = (
        bytes_of(write_report(one_language, folder).parent)
        for folder in (reports, reports, reports.parent / "beside")
    )
    assert first == again == beside


def test_every_generation_is_there_and_harmless(tmp_path, reports):
    lines = [
        sample(doc, NASTY + str(doc), doc % 2 == 0, prompt=NASTY * 3, target=NASTY)
        for doc in range(31)
    ]
    folder = write_eval(
        tmp_path / "runs" / "e", [score("mgsm", 0.5, 31, "qac")], {"mgsm.qac": lines[::-1]}
    )
    cell = CellResult(
        NASTY, NASTY, 50.0, runs=["e", NASTY], scores=[CellScore("e", {NASTY: NASTY})], task="mgsm"
    )
    results = results_of([cell], {"e": folder}, title=NASTY, failed={NASTY: NASTY})
    path = write_report(results, reports)
    page = Page(path)
    assert len(page.scripts) == 3 and "<script>alert" not in path.read_text()
    data = json.loads(page.scripts[1])
    (items,) = data["models"].values()
    assert list(data["models"]) == [NASTY]
    shown = [[data["strings"][index] for index in item] for item in items]
    assert [line[:7] for line in shown] == [
        [
            NASTY,
            "qac",
            str(line["doc_id"]),
            line["prompt"],
            line["target"],
            "✓ right" if line["correct"] else "✗ wrong",
            line["extracted"],
        ]
        for line in lines
    ]
    assert [line[7] for line in shown] == [line["response"] for line in lines]


def test_the_map_of_an_analysis_is_an_image_of_the_page(one_language, reports):
    folder = one_language.runs[0].folder.parent / "analyze-1"
    folder.mkdir()
    (folder / "map.svg").write_text("<svg><text>rows above 1e-05</text></svg>")
    analysis = RunResult("analyze-1", "analyze", folder)
    page = write_report(replace(one_language, runs=[*one_language.runs, analysis]), reports)
    html = page.read_text(encoding="utf-8")
    assert "Changes by training" in html
    content = base64.b64encode((folder / "map.svg").read_bytes()).decode()
    assert f'src="data:image/svg+xml;base64,{content}"' in html


def test_a_cell_expands_into_runs(tmp_path, reports):
    """Each run is linked."""
    right = {("qaa", 0): 10, ("qaa", 1): 20, ("qab", 0): 31}
    found, scores = {}, []
    for (language, seed), count in right.items():
        name = f"swap-{language}-s{seed}"
        found[name] = write_eval(
            tmp_path / "runs" / name, [score("mgsm", count / 40, 40, language)]
        )
        scores.append(CellScore(name, {"language": language, "seed": str(seed)}))
    scores.append(CellScore("swap-qab-s1", {"language": "qab", "seed": "1"}))
    cells = [
        CellResult(
            "swap", "math", 51.2, n=4, runs=[*found, "swap-qab-s1"], scores=scores, task="mgsm"
        )
    ]
    cells.append(
        CellResult("swap", "loss", 1.234, runs=["sft-1"], digits=3)
    )  # a fact of a training
    path = write_report(results_of(cells, found), reports)
    page, closed = (
        Page(path),
        re.sub(r"(?s)(<details>.*?</summary>).*?</details>", r"\1", path.read_text()),
    )
    _, (_, math, loss) = page.tables[0]
    lines = [" ".join(line.split()) for line in math.splitlines() if line.strip()]
    assert lines == [
        "51.2 ×4",
        *found,
        "swap-qab-s1",
        "answers",
    ]
    assert loss.split() == ["1.234", "sft-1"]
    assert ">swap-qab-s1<" not in closed and "51.2" in closed
    places = [
        (attrs["data-model"], attrs["data-column"])
        for tag, attrs in page.tags
        if "data-model" in attrs
    ]
    assert places == [("swap", "math")] and page.addresses.count("#run-swap-qaa-s1") == 1


def test_the_best_cells_are_bold_and_those_alone(one_language, reports):
    cells = [
        replace(cell, best=(cell.row, cell.column) == ("layer swap", "mgsm"))
        for cell in one_language.cells
    ]
    path = write_report(replace(one_language, cells=cells), reports)
    page = Page(path)
    (best,) = [attrs for tag, attrs in page.tags if tag == "td" and attrs.get("class") == "best"]
    (value,) = [cell.value for cell in cells if cell.best]
    assert float(best["data-value"]) == value
    assert f"<b>{value:.1f}</b>" in path.read_text()
