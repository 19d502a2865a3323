"""The page as a reader has it, in a browser: hostile text stays text, and what can be clicked does what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up_report import line_of, made_up, sample, score, write_eval

from pipeline.report.html.write import write_report
from pipeline.report.load.contents import CellResult, CellScore, FailedRun, RunResult

pytestmark = pytest.mark.browser

HOSTILE = (
    '</script><script>window.hit=1</script><img src=x onerror="window.hit=2"><svg onload="window.hit=3">'
    '\u2028window.hit=4\u2029 <a href="javascript:window.hit=5">x</a> "><script>window.hit=6</script> {{ 7*7 }} ${7*7}'
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    home = tmp_path_factory.mktemp("browser")
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1280,900",
        f"--user-data-dir={home}",
    ):
        options.add_argument(word)
    options.binary_location = "/usr/bin/chromium"
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    yield driver
    driver.quit()


def choose(browser: Any, name: str, text: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(browser.find_element("id", f"choose-{name}")).select_by_visible_text(text)


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_hostile_text_stays_text(tmp_path: Path, browser: Any) -> None:
    """In answers, prompts, titles, names of rows and runs, reasons, configurations, data cards, and links."""
    lines = [sample(doc, HOSTILE + str(doc), doc % 2 == 0, prompt=HOSTILE, target=HOSTILE) for doc in range(3)]
    runs = tmp_path / "runs"
    folder = write_eval(runs / "e", [score("mgsm", 0.5, 3, "qac")], {"mgsm.qac": lines})
    (runs / "d").mkdir()
    (runs / "d" / "data_card.md").write_text(HOSTILE)
    run = RunResult(
        "e", "eval", folder, HOSTILE, stale=HOSTILE, unlike=[HOSTILE], model=HOSTILE, card="d", reason=HOSTILE,
        parents={"javascript:window.hit=7": "d"}, config={HOSTILE: HOSTILE},
    )  # fmt: skip
    data = RunResult("d", "data", runs / "d", HOSTILE)
    cell = CellResult(
        HOSTILE, HOSTILE, 1.0, 0.5, 1.5, 2, 3.0, suspect=HOSTILE, missing=HOSTILE, runs=["e", HOSTILE],
        scores=[CellScore("e", {HOSTILE: HOSTILE})], task="mgsm",
    )  # fmt: skip
    results = replace(
        made_up(tmp_path / "x", ["qac"], []), rows=[HOSTILE], columns=[HOSTILE], title=HOSTILE, note=HOSTILE,
        command=HOSTILE, failed=[FailedRun(HOSTILE, HOSTILE)], missing=[FailedRun(HOSTILE, HOSTILE)], cells=[cell],
        runs=[run, data], git={HOSTILE: HOSTILE}, choices={HOSTILE: {"chosen": {"b": HOSTILE}, "candidates": []}},
        contrasts=[line_of(HOSTILE, HOSTILE, HOSTILE, 4.0, 0.01, detail=HOSTILE)],
    )  # fmt: skip
    browser.get(write_report(results, runs / "reports" / "t").as_uri())
    for link in browser.find_elements("css selector", "a[data-runs], dialog button"):
        browser.execute_script("arguments[0].click()", link)
    for details in browser.find_elements("css selector", "dialog details > summary"):
        browser.execute_script("arguments[0].click()", details)
    shown = browser.find_element("css selector", "#dialog").get_attribute("textContent")
    assert HOSTILE in shown
    reply = browser.find_element("css selector", ".answer .reply").get_attribute("textContent")
    assert reply == HOSTILE + "0"
    assert browser.execute_script("return window.hit === undefined")
    assert browser.find_elements("css selector", "img, iframe, a[href^='javascript']") == []
    assert len(browser.find_elements("css selector", "script")) == 2
    assert errors(browser) == []


def test_what_can_be_clicked(tmp_path: Path, browser: Any) -> None:
    results = made_up(tmp_path / "runs", ["qac"], [0], n=40)
    training = replace(results.runs[-1], config={"seed": 3}, parents={"data": "gone-1"})
    results = replace(results, runs=[*results.runs[:-1], training])
    browser.get(write_report(results, tmp_path / "runs" / "reports" / "t").as_uri())

    def column(place: int) -> list[float]:
        cells = browser.find_elements("css selector", f"table.sortable tbody:last-of-type td:nth-child({place})")
        return [float(cell.get_attribute("data-value")) for cell in cells if cell.get_attribute("data-place")]

    before = column(2)
    browser.find_element("css selector", "table.sortable th:nth-child(2) button").click()
    assert column(2) == sorted(before, reverse=True)
    browser.find_element("css selector", "table.sortable th:nth-child(2) button").click()
    assert column(2) == sorted(before)

    # a cell leads to its run, and the run to its answers
    cell = browser.find_element("css selector", "table.sortable tbody:last-of-type td[data-place]")
    place = json.loads(cell.get_attribute("data-place"))
    browser.execute_script("arguments[0].click()", cell.find_element("css selector", "a"))
    dialog = browser.find_element("id", "dialog")
    name = cell.find_element("css selector", "a").get_attribute("data-runs")
    assert dialog.is_displayed() and name in dialog.text and "12 s" in dialog.text
    dialog.find_element("xpath", ".//button[text()='Show answers']").click()
    assert not dialog.is_displayed()
    chosen = "return ['row', 'column'].map(name => document.getElementById('choose-' + name).value)"
    assert browser.execute_script(chosen) == place and place[1] == "mgsm"

    # a training shows its configuration, parents and curve
    browser.execute_script(
        "arguments[0].click()", browser.find_element("css selector", f"#run-{training.name} a[data-runs]")
    )
    assert "seed\n3" in dialog.text and "gone-1" in dialog.text and dialog.find_elements("css selector", "svg polyline")
    dialog.find_element("xpath", ".//button[text()='gone-1']").click()
    assert "created elsewhere" in dialog.text
    dialog.find_element("xpath", ".//button[text()='close']").click()

    # two models side by side
    choose(browser, "row", "soup")
    choose(browser, "other", "base")
    choose(browser, "kind", "one right, the other wrong")
    pairs = browser.find_elements("css selector", ".answer .pair")
    data = json.loads(browser.find_element("id", "data").get_attribute("textContent"))
    mine, theirs = (
        {
            item[0]: item[5]
            for one in data["cells"]
            if (one["row"], one["column"]) == (row, place[1])
            for item in one["items"]
        }
        for row in ("soup", "base")
    )
    assert len(pairs) == sum(mine[doc] != theirs[doc] for doc in mine) > 0
    for pair in pairs:
        assert {one.text for one in pair.find_elements("css selector", ".verdict")} == {"✓ right", "✗ wrong"}
    assert errors(browser) == []


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_are_readable(tmp_path: Path, browser: Any, dark: bool) -> None:
    """Text on its background at 4.5 : 1, links, captions, marks and charts included (WCAG 2.1, 1.4.3)."""
    results = made_up(tmp_path / "runs", ["qac"], [0], n=10)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [
        {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    ]})  # fmt: skip
    browser.get(write_report(results, tmp_path / "runs" / "reports" / "t").as_uri())
    pairs = browser.execute_script("""
        var found = {};
        var seen = "h1, h2, p, caption, th, td, a, figcaption, summary, .spread, .badge, svg text, .verdict";
        document.querySelectorAll(seen).forEach(function (one) {
          if (!one.textContent.trim()) return;
          var behind = one, style = getComputedStyle(one), ground;
          do { ground = getComputedStyle(behind).backgroundColor; behind = behind.parentElement; }
          while (behind && ground === "rgba(0, 0, 0, 0)");
          var ink = one instanceof SVGElement ? style.fill : style.color;
          found[ink + "|" + ground] = one.tagName + "." + one.getAttribute("class");
        });
        return found;""")
    for colours, where in pairs.items():
        ink, ground = (luminance(one) for one in colours.split("|"))
        contrast = (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05)
        assert contrast >= 4.5, (colours, where, contrast)
    ground = browser.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
    assert (luminance(ground) < 0.1) == dark


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
