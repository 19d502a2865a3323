"""The whole table on tiny models: made, made again (nothing is), and with one run that fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tiny_words import FEW, WORLD

from pipeline.config import compose, conf
from pipeline.config import words as words_
from pipeline.study import command_rows, execute
from pipeline.study.table import gather

REAL_STAGE = execute.stage_function


@pytest.fixture
def table(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of table=tiny: conf/table/sandbox.yaml with a tiny base, few items and few steps."""
    copy = tmp_path / "conf"
    shutil.copytree(conf.folder(), copy)
    sandbox: dict[str, Any] = yaml.safe_load((copy / "table/sandbox.yaml").read_text())
    start = {"model": "trained", "model.path": str(base)}
    few = dict(word.split("=") for word in FEW)
    for words in sandbox["rows"].values():
        if words.get("stage") == "sft":
            words |= start | few
    small = dict(word.split("=") for word in WORLD) | {"stage": "data"}
    scores = sandbox["eval"] | {"eval.limit": 2, "eval.max_gen_toks": 4}
    tiny = sandbox | {"name": "tiny", "base": start, "data_root": small, "eval": scores}
    (copy / "table/tiny.yaml").write_text(yaml.safe_dump(tiny, sort_keys=False))
    monkeypatch.setattr(conf, "folder", lambda: copy)
    return ["table=tiny", f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]


class Calls:
    """Counts the stages that are made, and fails those of a run whose label holds `fails`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.fails: str | None = None
        monkeypatch.setattr(execute, "stage_function", self.stage_function)

    def stage_function(self, run: Any) -> Any:
        self.made.append(run.label)
        if self.fails and run.label.startswith(self.fails):
            raise RuntimeError("injected by the test")
        return REAL_STAGE(run)


def times(folder: Path) -> dict[Path, int]:
    return {
        path: path.stat().st_mtime_ns
        for path in folder.glob("*/**/*")
        if path.is_file() and "reports" not in path.parts
    }


def test_a_table_from_nothing_with_a_failure_and_again(
    table: list[str], call: Callable[..., SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_dir = tmp_path / "runs"
    planned = call("stage=plan", *table)
    assert planned.status == 0 and planned.out.count("never made") == 16 and "16 of 16 runs to make" in planned.out
    refused = call("stage=report", *table)
    assert refused.status == 1 and "table=tiny has no finished run in" in refused.err

    # one merge fails: what does not need it is made, the report says so, the status is 1
    calls = Calls(monkeypatch)
    calls.fails = "soup"
    told = call("stage=table", *table)
    assert told.status == 1 and told.out == ""
    assert "RuntimeError: injected by the test" in told.err and "Traceback" in told.err
    last = told.err.strip().splitlines()[-1]
    assert last.startswith("error: 2 runs failed (soup-") and "eval-sandbox-soup" in last
    assert len(calls.made) == 15  # all but the evaluation of the soup
    page = runs_dir / "reports/tiny/index.html"
    assert page.is_file() and "injected by the test" in page.read_text(encoding="utf-8")
    assert "2 of 16 runs to make" in call("stage=plan", *table).out

    # the same command makes the rest
    before = times(runs_dir)
    calls.fails, calls.made = None, []
    told = call("stage=table", *table)
    assert (told.status, told.out.strip()) == (0, str(page))
    assert [label.partition("-")[0] for label in calls.made] == ["soup", "eval"]
    assert {path: time for path, time in times(runs_dir).items() if path in before} == before
    assert "injected by the test" not in page.read_text(encoding="utf-8")
    for name in ("table.csv", "table.md", "plots"):
        assert (page.parent / name).exists(), sorted(path.name for path in page.parent.iterdir())
    asked = command_rows.study(compose.compose(["stage=table", *table]))  # type: ignore[arg-type]
    for cell in gather(asked.config, asked, {})["cells"]:
        found = json.loads((Path(cell["eval"]) / "scores.json").read_text())
        assert {row["task"] for row in found["rows"]} == {"mgsm", "belebele", "global_mmlu", "flores"}
        assert cell["manifest_warnings"] == [] and cell["seconds"] > 0

    # and once more, nothing
    before, calls.made = times(runs_dir), []
    assert call("stage=table", *table).status == 0
    assert calls.made == [] and times(runs_dir) == before
    assert "0 of 16 runs to make" in call("stage=plan", *table).out
    status = call("stage=status", f"runs_dir={runs_dir}")
    assert status.out.splitlines()[-1] == "16 finished, unpublished work: none"

    # a parent that was made again with other contents: its children are to be made, their children too
    manifest = next(runs_dir.glob("math-*/manifest.json"))
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"facts": {"weights": {"root": "other"}}}))
    planned = call("stage=plan", *table)
    assert planned.out.count("was made again with other contents") == 5  # its evaluation, and four merges
    assert planned.out.count("is made first") == 4 and "9 of 16 runs to make" in planned.out
    told = call("stage=report", *table)
    assert (told.status, told.out.strip()) == (0, str(page)) and told.err.count("missing: ") == 9


def test_a_run_that_changed_on_disk_stops_only_what_needs_it(
    table: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writes(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
        (work / "x").write_text("x")
        return {}

    monkeypatch.setattr(execute, "stage_function", lambda run: writes)
    asked = command_rows.study(compose.compose(["stage=table", *table]))  # type: ignore[arg-type]
    assert execute.execute(asked.targets) == {}
    (next((tmp_path / "runs").glob("math-*")) / "x").write_text("changed")
    failed = execute.execute(asked.targets)
    assert {name.partition("-")[0] for name in failed} == {"math", "layer_swap", "soup", "ties", "eval"}
    assert len(failed) == 10 and sum("was changed after it was finished" in reason for reason in failed.values()) == 1


def test_a_failed_parent_of_one_run_is_the_reason(
    call: Callable[..., SimpleNamespace], tmp_path: Path, world: Path, base: Path
) -> None:
    few = ["data.size=1000000", "model=trained", f"model.path={base}", f"data_root={world}"]
    told = call("stage=sft", "expert=math", *few, f"runs_dir={tmp_path}/runs", "tracking.mode=disabled")
    assert told.status == 1 and told.err.count("error: ") == 1
    assert told.err.splitlines()[-1].startswith("error: data-math-") and "has 40: ask for fewer" in told.err


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (None, "null"),
        (True, "True"),
        ([1, "a b"], "[1,'a b']"),
        ({"a": [None], "b": "x'y"}, "{a:[null],b:'x\\'y'}"),
        ("hub:a/b-1.0", "hub:a/b-1.0"),
    ],
)
def test_a_value_of_a_row_is_written_in_the_grammar_of_the_command_line(word: Any, expected: str) -> None:
    assert words_.word(word) == expected
    assert compose.parse(f"key={expected}").value() == word or isinstance(word, dict)


def test_what_a_row_says_stands_above_the_table(tmp_path: Path) -> None:
    words = {"stage": "sft", "expert": "math", "data_root": "mine", "threads": 3}
    config: Any = command_rows.row_config(words, {"runs_dir": str(tmp_path), "threads": 1}, data_root="theirs")
    assert (config.data_root, config.threads, config.runs_dir) == ("mine", 3, str(tmp_path))
