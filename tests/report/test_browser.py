"""The page as a reader has it, in a browser.

Hostile text stays text, and what can be clicked does what it says.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from made_up_report import line_of, made_up, read, sample, score, write_eval

from pipeline.report.compare import correct_contrasts
from pipeline.report.load.contents import CellResult, CellScore, Results, RunResult
from pipeline.report.write import write_report

pytestmark = pytest.mark.browser

HOSTILE = (
    '</script><script>window.hit=1</script><img src=x onerror="window.hit=2"><svg'
    ' onload="window.hit=3">\u2028window.hit=4\u2029 <a href="javascript:window.hit=5">x</a>'
    ' "><script>window.hit=6</script> {{ 7*7 }} ${7*7}'
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
    driver = webdriver.Chrome(options=options, service=Service(which("chromedriver")))
    yield driver
    driver.quit()


def choose(browser: Any, selector: str, text: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(browser.find_element("css selector", selector)).select_by_visible_text(text)


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_hostile_text_stays_text(tmp_path: Path, browser: Any) -> None:
    """Hostile text is in answers, prompts, titles, names, reasons, configurations and links."""
    lines = [
        sample(doc, HOSTILE + str(doc), doc % 2 == 0, prompt=HOSTILE, target=HOSTILE)
        for doc in range(3)
    ]
    runs = tmp_path / "runs"
    folder = write_eval(runs / "e", [score("mgsm", 0.5, 3, "qac")], {"mgsm.qac": lines})
    (runs / "d").mkdir()
    run = RunResult(
        "e",
        "eval",
        folder,
        stale=HOSTILE,
        model=HOSTILE,
        reason=HOSTILE,
        parents={"javascript:window.hit=7": "d"},
        config={HOSTILE: HOSTILE},
    )
    data = RunResult("d", "data", runs / "d")
    cell = CellResult(
        HOSTILE,
        HOSTILE,
        1.0,
        0.5,
        1.5,
        2,
        3.0,
        suspect=HOSTILE,
        missing=HOSTILE,
        runs=["e", HOSTILE],
        scores=[CellScore("e", {HOSTILE: HOSTILE})],
        task="mgsm",
    )
    results = replace(
        made_up(tmp_path / "x"),
        rows=[HOSTILE],
        columns=[HOSTILE],
        title=HOSTILE,
        note=HOSTILE,
        command=HOSTILE,
        failed={HOSTILE: HOSTILE},
        missing={HOSTILE: HOSTILE},
        runs=[run, data],
        git={HOSTILE: HOSTILE},
        choices={HOSTILE: {"chosen": {"b": HOSTILE}, "candidates": []}},
        contrasts=correct_contrasts(
            [line_of(HOSTILE, HOSTILE, HOSTILE, 4.0, 0.01, detail=HOSTILE)]
        ),
        **read([cell], [run]),
    )
    browser.get(write_report(results, runs / "reports" / "t").as_uri())
    for link in browser.find_elements("css selector", "a[href^='#']"):
        browser.execute_script("arguments[0].click()", link)
    assert HOSTILE in browser.find_element("css selector", "[id^=run-]").get_attribute(
        "textContent"
    )
    lines = answers_shown(browser)
    assert len(lines) == 3 and [line[3] for line in lines] == [
        HOSTILE.split()[-1] + str(doc) for doc in range(3)
    ]
    assert [line[1] for line in lines] == [HOSTILE + str(doc) for doc in range(3)]
    assert browser.execute_script("return window.hit === undefined")
    assert browser.find_elements("css selector", "img, iframe, a[href^='javascript']") == []
    assert len(browser.find_elements("css selector", "script")) == 3
    assert errors(browser) == []


def answers_shown(browser: Any) -> list[list[str]]:
    """Return the lines of the table of answers, once it is on the page."""
    from selenium.webdriver.support.ui import WebDriverWait

    rows = "#list tbody tr"
    WebDriverWait(browser, 20).until(lambda one: one.find_elements("css selector", rows))
    script = (
        "[...document.querySelectorAll(arguments[0])].map(row => [...row.cells].map(one =>"
        " one.textContent))"
    )
    return browser.execute_script(f"return {script}", rows)


def test_what_can_be_clicked(one_language: Results, reports: Path, browser: Any) -> None:
    training = replace(one_language.runs[-1], config={"seed": 3}, parents={"data": "gone-1"})
    results = replace(one_language, runs=[*one_language.runs[:-1], training])
    browser.get(write_report(results, reports).as_uri())

    def column() -> list[float]:
        cells = browser.find_elements(
            "css selector", "table.sortable:first-of-type tbody td:nth-child(2)"
        )
        return [float(cell.get_attribute("data-value")) for cell in cells[: len(results.rows)]]

    before = column()
    browser.find_element("css selector", "table.sortable th:nth-child(2) button").click()
    assert column() == sorted(before, reverse=True)
    browser.find_element("css selector", "table.sortable th:nth-child(2) button").click()
    assert column() == sorted(before)

    # a cell expands; its lines lead to the run, whose line opens, and to the answers, whose section
    # opens
    cell = browser.find_element("css selector", "table.sortable tbody td:nth-child(2)")
    run, answers = (
        cell.find_element("css selector", f"a[href^='{to}']") for to in ("#run-", "#answers")
    )
    assert not run.is_displayed()
    cell.find_element("css selector", "summary").click()
    run.click()
    assert "12 s" in browser.find_element("id", run.get_attribute("href").partition("#")[2]).text
    assert not browser.find_element("id", "model").is_displayed()
    place = [answers.get_attribute(f"data-{name}") for name in ("model", "column")]
    answers.click()
    lines = answers_shown(browser)
    assert browser.find_element("id", "model").get_attribute("value") == place[0]
    assert {line[6] for line in lines} == {place[1]} == {"mgsm"} and len(lines) == 10

    # a training shows its configuration and parents; a key opens it as a click does
    browser.find_element("css selector", "nav a[href='#runs']").click()
    from selenium.webdriver.common.keys import Keys

    line = browser.find_element("id", f"run-{training.name}")
    browser.execute_script("arguments[0].focus()", line.find_element("css selector", "summary"))
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert "seed=3" in line.text and "gone-1" in line.text

    # two models side by side, a search, a filter
    choose(browser, "#model", "soup")
    choose(browser, "#other", "base")
    both = {line[0]: (line[2], line[6]) for line in all_lines(browser) if line[10] == "mgsm"}
    data = json.loads(browser.find_element("id", "data").get_attribute("textContent"))
    wanted = [
        {
            data["strings"][item[2]]: data["strings"][item[5]]
            for item in data["models"][name]
            if data["strings"][item[0]] == "mgsm"
        }
        for name in ("soup", "base")
    ]
    assert both == {doc: (wanted[0][doc], wanted[1][doc]) for doc in wanted[0]} and len(both) == 40
    search = browser.find_element("css selector", "input[type=search]")
    search.send_keys('"ana HAD 17 loko"')
    assert {line[0] for line in answers_shown(browser)} == {"17"}
    assert errors(browser) == []


def test_a_phone_shows_responses_without_scrolling(
    one_language: Results, reports: Path, browser: Any
) -> None:
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        browser.get(write_report(one_language, reports).as_uri())
        browser.find_element("css selector", "nav a[href='#answers']").click()
        responses = [line[1] for line in answers_shown(browser)]
        cells = browser.find_elements("css selector", "#list tbody td:nth-child(2)")
        assert all("The answer is" in response for response in responses[:2])
        assert all(cell.rect["x"] + cell.rect["width"] <= 390 for cell in cells)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def all_lines(browser: Any) -> list[list[str]]:
    answers_shown(browser)
    choose(browser, ".dt-length select", "All")
    return answers_shown(browser)


def test_without_javascript_the_tables_are_there(
    one_language: Results, reports: Path, browser: Any
) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(write_report(one_language, reports).as_uri())
        cells = browser.find_elements("css selector", "[aria-label='The table'] td")
        assert len([cell for cell in cells if cell.text]) == len(one_language.cells)
        assert (
            "layer swap" in browser.find_element("css selector", "[aria-label='Comparisons']").text
        )
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_are_readable(
    one_language: Results, reports: Path, browser: Any, dark: bool
) -> None:
    """Text, links, captions, marks and charts have a contrast of 4.5 : 1 (WCAG 2.1, 1.4.3)."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]},
    )
    browser.get(write_report(one_language, reports).as_uri())
    pairs = browser.execute_script("""
        var found = {};
        var seen = "h1, h2, p, caption, th, td, a, figcaption, summary, .spread, .badge, svg text, .verdict";
        document.querySelectorAll(seen).forEach(function (one) {
          if (!one.textContent.trim()) return;
          var behind = one, style = getComputedStyle(one), layers = [], alpha = 0;
          for (; behind && alpha < 1; behind = behind.parentElement) {
            var parts = getComputedStyle(behind).backgroundColor.match(/[\\d.]+/g).map(Number);
            alpha = parts.length > 3 ? parts[3] : 1;
            layers.unshift(parts);
          }
          var ground = layers.reduce(function (below, above) {  // translucent layers over the first opaque one
            var share = above.length > 3 ? above[3] : 1;
            return [0, 1, 2].map(function (channel) { return share * above[channel] + (1 - share) * below[channel]; });
          }, [255, 255, 255]);
          var ink = one instanceof SVGElement ? style.fill : style.color;
          found[ink + "|rgb(" + ground.join(", ") + ")"] = one.tagName + "." + one.getAttribute("class");
        });
        return found;""")
    for colours, where in pairs.items():
        ink, ground = (luminance(one) for one in colours.split("|"))
        contrast = (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05)
        assert contrast >= 4.5, (colours, where, contrast)
    ground = browser.execute_script(
        "return getComputedStyle(document.documentElement).backgroundColor"
    )
    assert (luminance(ground) < 0.1) == dark


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
