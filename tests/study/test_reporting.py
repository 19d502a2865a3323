"""stage=report and stage=export of a table of made-up runs.

What is shown, marked, remembered, packed, refused.
"""

import csv
import io
import json
import os
import re
import shlex
import shutil
import zipfile
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import Call
from made_up_runs import finish
from safetensors.torch import save_file

from pipeline.config.compose import compose
from pipeline.files import ADDED_CONF
from pipeline.models.checkpoint import digest_tensors, weights_root
from pipeline.report import results as frames
from pipeline.runs.graph import order_runs
from pipeline.runs.manifest import MANIFEST, read_manifest
from pipeline.tables.planned_runs import Planning

TABLE = """
name: {name}
title: "=1+1 swaps"
published: unreasonable.table3
axes: {{seed: [0, 1], counts: {{1+0: {{bottom: 1, top: 0}}, 3+1: {{bottom: 3, top: 1}}}}}}
every: {{model: sandbox, data_root: world}}
runs:
  world: {{stage: data, expert: sandbox}}
  base: {{}}
  math expert: {{stage: sft, expert: math, recipe: sandbox_math, seed: "{{seed}}"}}
  language expert: {{stage: sft, expert: qac, recipe: sandbox_language, seed: "{{seed}}"}}
  swap: {{merge: layer_swap, merge.math: math expert, merge.language: language expert,
    merge.bottom_layers: "{{counts.bottom}}", merge.top_layers: "{{counts.top}}"}}
score: {{eval: mgsm_0shot, eval.max_gen_toks: 40, mean: [seed]}}
columns: {{math: {{in: en}}, low: {{in: qac}}}}
rows:
  base: {{run: base}}
  math expert: {{run: math expert}}
  swap: {{run: swap, best: [counts], by: {{in: qac, eval.split: dev}}}}
compare: {{swap: [base, math expert]}}
"""


def made(words: list[str], most: int = 10**9, **fields: Any) -> list[Any]:
    """Finish what a table asks for, choices included, as far as `most` runs go; gives its runs."""
    planning = Planning.of(compose(["stage=report", *words]))  # type: ignore[arg-type]
    while left := [
        run for run in order_runs(planning.targets()) if read_manifest(run.folder) is None
    ][:most]:
        finish(left, 20, **fields)
        if most < 10**9:
            break
    return order_runs(planning.targets())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a runs_dir with all runs of the table, old enough to be settled."""
    home = tmp_path_factory.mktemp("reporting")
    (home / "t.yaml").write_text(
        TABLE.format(name="t").replace("published: unreasonable.table3\n", "")
    )
    made([f"table={home / 't.yaml'}", f"runs_dir={home / 'runs'}"])
    return home


@pytest.fixture
def home(finished: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may change, with the same times."""
    shutil.copytree(finished, tmp_path / "home")
    return tmp_path / "home"


def words(home: Path) -> list[str]:
    return [f"table={home / 't.yaml'}", f"runs_dir={home / 'runs'}", "tracking.mode=disabled"]


def test_an_archive_is_the_zipped_folder_of_the_report(
    home: Path, call: Call, tmp_path: Path
) -> None:
    """Unzipped elsewhere, its page and its answers are read as those of the disk."""
    told = call("stage=report", *words(home), status=0)
    report = Path(told.out.strip()).parent
    assert call("stage=export", *words(home), f"export.to={tmp_path}/1.zip").status == 0
    shutil.unpack_archive(tmp_path / "1.zip", tmp_path)
    unzipped = {
        path.relative_to(tmp_path / "t").as_posix()
        for path in (tmp_path / "t").rglob("*")
        if path.is_file()
    }
    here = {path.relative_to(report).as_posix() for path in report.rglob("*") if path.is_file()}
    assert unzipped == here - {"report.json"} | {"table.yaml"} and "plots/scores.svg" in unzipped
    text = (tmp_path / "t/index.html").read_text(encoding="utf-8")
    assert "layer_swap" in text and "../../eval" not in text  # links to what is not here
    for read, stored in zip(frames(tmp_path / "t"), frames(report), strict=True):
        assert read.equals(stored) and read.run.nunique() > 1
    assert (
        "is a report in one file. Unzip it"
        in call("stage=report", f"table={tmp_path}/1.zip", status=1).err
    )


def test_an_archive_carries_own_languages_and_options(
    home: Path, call: Call, tmp_path: Path, monkeypatch: Any
) -> None:
    """For who computes it again: quy is a language that nobody ships."""
    own = tmp_path / "conf"
    (own / "language").mkdir(parents=True), (own / "recipe").mkdir()
    (own / "language/quy.yaml").write_text("{name: Quechua, flores: quy_Latn}\n")
    (own / "recipe/mine.yaml").write_text("# @package sft\nlearning_rate: 3e-4\n")
    for group in ("launcher", "tracking"):
        (own / group).mkdir()
        (own / group / "site.yaml").write_text("setup: ['export HF_TOKEN=open-sesame']\n")
    table = home / "t.yaml"
    table.write_text(table.read_text().replace("low: {in: qac}", "low: {in: quy}"))
    assert "quy" in table.read_text()
    monkeypatch.setenv(ADDED_CONF, str(own))
    made([f"table={table}", f"runs_dir={home / 'runs'}"])
    monkeypatch.setenv(ADDED_CONF, "")
    call(
        f"--config-dir={own}", "stage=export", *words(home), f"export.to={tmp_path}/t.zip", status=0
    )
    with zipfile.ZipFile(tmp_path / "t.zip") as archive:
        assert archive.read("t/conf/recipe/mine.yaml").decode().startswith("# @package sft")
        options = {
            name
            for name in archive.namelist()
            if name.startswith("t/conf/") and name.endswith(".yaml")
        }
        assert options == {"t/conf/language/quy.yaml", "t/conf/recipe/mine.yaml"}
        assert not [name for name in archive.namelist() if b"open-sesame" in archive.read(name)]


def test_the_command_on_the_page_computes_the_table(home: Path, call: Call, tmp_path: Path) -> None:
    """With a folder of options of one's own, whose name needs quotes.

    It finds all runs finished.
    """
    (tmp_path / "my conf/tables").mkdir(parents=True)
    (home / "t.yaml").rename(tmp_path / "my conf/tables/mine.yaml")
    options = ["table=mine", f"runs_dir={home / 'runs'}", "tracking.mode=disabled"]
    folders = ["--config-dir", str(tmp_path / "my conf")]
    told = call(*folders, "stage=report", *options, "every.eval.batch_size=50", status=0)
    page = Path(told.out.strip()).read_text(encoding="utf-8")
    export, command = re.findall(r'<code class="command"[^>]*>(.*?)</code>', page)
    words = shlex.split(unescape(command))
    assert words[:3] == ["python", "-m", "pipeline"] and "every.eval.batch_size=50" in words
    told = call(*words[3:], "tracking.mode=disabled", status=0)
    assert (
        "[1/" not in told.err
        and Path(told.out.strip()).read_text(encoding="utf-8").count(command) == 1
    )
    words = shlex.split(unescape(export))
    assert words[:3] == ["python", "-m", "pipeline"] and words[-1] == "export.to=t.tex"
    told = call(*words[3:-1], f"export.to={tmp_path}/t.tex")
    assert told.status == 0 and "tabular" in (tmp_path / "t.tex").read_text(), told.err


def test_cells_are_exported_as_in_the_report(home: Path, call: Call, tmp_path: Path) -> None:
    folder = Path(call("stage=report", *words(home)).out.strip()).parent
    for replaced in (False, True):
        told = call(
            "stage=export", *words(home), "export.format=latex", f"export.to={tmp_path}/t.tex"
        )
        assert (
            told.status == 0
            and (f"export.to={tmp_path}/t.tex exists and is replaced" in told.err) is replaced
        )
    with (folder / "cells.csv").open(encoding="utf-8") as file:
        values = [float(row["value"]) for row in csv.DictReader(file) if row["value"]]
    text = (tmp_path / "t.tex").read_text(encoding="utf-8")
    assert values and all(f"{value:.1f}" in text for value in values)
    told = call("stage=export", "checkpoint=./m", "export.format=latex", "export.to=./x")
    assert told.status == 1 and "export.format=latex applies to table=T only. Remove it" in told.err


def test_an_archive_holds_no_weights_or_secrets(home: Path, call: Call, tmp_path: Path) -> None:
    training = next(home.glob("runs/math-full-*"))
    (training / "model.safetensors").write_bytes(b"weights")
    kept = json.loads((training / MANIFEST).read_text())
    kept["environment"] = {"HF_TOKEN": "hf_secret"}
    kept["decided_by"]["config"]["note"] = "https://user:hunter2@host/x?token=abc"
    (training / MANIFEST).write_text(json.dumps(kept))
    assert call("stage=export", *words(home), f"export.to={tmp_path}/t.zip").status == 0
    with zipfile.ZipFile(tmp_path / "t.zip") as archive:
        names = archive.namelist()
        text = "".join(archive.read(name).decode(errors="replace") for name in names)
    endings = {"json", "yaml", "md", "csv", "html", "txt", "parquet", "svg"}
    assert {name.rpartition(".")[2] for name in names if not name.endswith("/")} == endings
    for secret in ("hf_secret", "hunter2", "token=abc"):
        assert secret not in text, secret


def test_stale_cells_are_marked(home: Path, call: Call) -> None:
    """One evaluation's answers are edited, and another evaluation's parent was made again."""
    evaluations = sorted(home.glob("runs/eval-mgsm_0shot-*"))
    edited = next(one for one in evaluations if "sandbox_base" in one.name)
    samples = next(edited.glob("samples/*.jsonl"))
    samples.write_text(samples.read_text().replace('"correct": false', '"correct": true '))
    training = next(home.glob("runs/math-full-s1-*"))
    log = json.loads((training / MANIFEST).read_text())
    log["facts"]["weights"] = {"root": "sha256:another"}
    (training / MANIFEST).write_text(json.dumps(log))
    text = unescape(
        Path(call("stage=report", *words(home)).out.strip()).read_text(encoding="utf-8")
    )
    assert f"stale: {samples.relative_to(edited)} differs" in text
    assert f"its checkpoint {training.name} was recomputed with other contents" in text
    rows = list(csv.DictReader((home / "runs/reports/t/results.csv").open(encoding="utf-8")))
    stale = {row["run"] for row in rows if row["stale"]}
    assert (
        edited.name not in {row["run"] for row in rows}
        and f"{edited.name}: {samples.relative_to(edited)} differs" in text
    )
    assert 0 < len(stale) < len({row["run"] for row in rows})


def edited(text: str) -> str:
    """Scores of the same length with another first value."""
    return re.sub(
        r'("value": 0\.)(\d)', lambda value: f"{value[1]}{9 - int(value[2])}", text, count=1
    )


@pytest.mark.parametrize(
    ("file", "change", "why"),
    [
        ("scores.json", edited, "scores.json differs"),
        ("scores.json", lambda text: text[:50], "scores.json differs"),
        ("scores.json", None, "scores.json is gone"),
        ("manifest.json", lambda text: text[:50], "manifest.json is not readable JSON"),
        (
            "manifest.json",
            lambda text: text.replace('"seconds": 1.5', '"seconds": NaN'),
            "not a manifest of this program",
        ),
    ],
)
def test_a_damaged_run_is_one_missing_cell(
    file: str, change: Any, why: str, home: Path, call: Call
) -> None:
    """Its size and its time are those of before, as after a bit that flipped on a disk."""
    (damaged,) = (home / "runs").glob("eval-mgsm_0shot-math*-s0-qac-*")
    stat = (damaged / file).stat()
    if change is None:
        (damaged / file).unlink()
    else:
        (damaged / file).write_text(change((damaged / file).read_text()))
        os.utime(damaged / file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    told = call("stage=report", *words(home), status=0)
    lines = list(
        csv.DictReader(io.StringIO(Path(told.out.strip()).with_name("cells.csv").read_text()))
    )
    missing = {
        (line["row"], line["column"]): line["missing"] for line in lines if not line["value"]
    }
    assert list(missing) == [("math expert", "low")]
    assert damaged.name in missing["math expert", "low"] and why in missing["math expert", "low"]


def test_a_table_of_an_earlier_version_reports(home: Path, call: Call) -> None:
    """A later version trained again, with the same weights and with others.

    Evaluations record the roots of trainings.
    """
    roots, trainings = {}, sorted(home.glob("runs/*-full-*"))
    for number, folder in enumerate(trainings):
        (folder / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": true}')
        save_file(
            {"model.norm.weight": torch.full((3,), number + 1.0)}, folder / "model.safetensors"
        )
        log = json.loads((folder / MANIFEST).read_text())
        roots[log["hash"]] = weights_root(digest_tensors(folder))
        if folder == trainings[-1]:
            save_file({"model.norm.weight": torch.zeros(3)}, folder / "model.safetensors")
        digests = digest_tensors(folder)
        log["facts"]["weights"] = {"root": weights_root(digests), "digests": digests}
        (folder / MANIFEST).write_text(json.dumps(log))
    for file in home.glob(f"runs/*/{MANIFEST}"):
        log = json.loads(file.read_text())
        for parent in log["parents"].values():
            parent["content"] = roots.get(parent["hash"], parent["content"])
        file.write_text(json.dumps(log))
    text = unescape(
        Path(call("stage=report", *words(home)).out.strip()).read_text(encoding="utf-8")
    )
    again = [
        one.name for one in trainings if f"{one.name} was recomputed with other contents" in text
    ]
    assert again == [trainings[-1].name] and len(trainings) > 2


def test_a_deleted_run_is_a_missing_cell(home: Path, call: Call) -> None:
    shutil.rmtree(next(home.glob("runs/eval-mgsm_0shot-math-full-s0-*")))
    page = Path(call("stage=report", *words(home), status=0).out.strip())
    text = unescape(page.read_text(encoding="utf-8"))
    assert (
        "1 run not started" in text and "not made (never made" in text and "run failed" not in text
    )
    rows = {
        (row["row"], row["column"]): row
        for row in csv.DictReader((page.parent / "cells.csv").open())
    }
    gone = [row for row in rows.values() if not row["value"]]
    assert len(gone) == 1 and gone[0]["missing"].endswith("is not made yet")


def test_the_data_root_of_the_table_is_remembered(home: Path, call: Call) -> None:
    """stage=table was asked with words of its own.

    stage=report without them finds the same runs, and says so.
    """
    folder = home / "runs/reports/t"
    folder.mkdir(parents=True)
    remembered = {
        "table": "t",
        "data_root": None,
        "every": {"eval.limit": 7},
        "failed": {},
    }
    made([*words(home), "every.eval.limit=7"])
    (folder / "report.json").write_text(json.dumps(remembered))
    assert (
        "With the settings of the last stage=table: every.eval.limit=7"
        in call("stage=report", *words(home), status=0).err
    )
    config = json.loads(next(home.glob("runs/eval-*/manifest.json")).read_text())["config"]
    assert config["eval"]["limit"] in (None, 7)
    with (folder / "results.csv").open(encoding="utf-8") as stream:
        names = {row["run"] for row in csv.DictReader(stream)}
    limits = {
        json.loads((home / "runs" / name / MANIFEST).read_text())["config"]["eval"]["limit"]
        for name in names
    }
    assert limits == {7}


def test_results_are_tidy_and_open_in_a_notebook(home: Path, call: Call) -> None:
    """One row a run, task, language and metric; knobs and intervals beside.

    The frames join.
    """
    folder = Path(call("stage=report", *words(home)).out.strip()).parent
    scores, answers = frames(folder)
    key = ["run", "task", "language", "metric", "filter"]
    assert (
        len(scores) == len(scores[key].drop_duplicates())
        and len(scores) == 6 * scores.run.nunique()
    )
    mine = scores[(scores.metric == "exact_match") & (scores["filter"] == "flexible-extract")]
    assert ((mine.low <= mine.value) & (mine.value <= mine.high)).all() and mine.value.between(
        0, 100
    ).all()
    joined = answers.groupby(["run", "task", "language"]).correct.mean().mul(100).round(6)
    assert joined.to_dict() == mine.set_index(["run", "task", "language"]).value.round(6).to_dict()
    swap = mine[mine.row.fillna("").str.startswith("swap")]
    chosen = json.loads((folder / "choices.json").read_text())
    (choice,) = chosen.values()
    assert set(swap.row) == {"swap"} and choice["chosen"]["counts"] in ("1+0", "3+1")
    assert set(swap.seed) == {0, 1} and mine[mine.row == "base"].seed.isna().all()
    assert set(swap.column) == {"swap | math", "swap | low"}
    assert swap.knobs.str.contains("merge.bottom_layers=").all() and (mine.threads == 2).all()
    assert (
        mine.weights_root.notna() | mine.model.str.startswith("layer_swap") | mine.row.isna()
    ).all()
    assert (
        not scores.astype(str)
        .apply(lambda column: column.str.startswith(("=", "+", "@")))
        .any()
        .any()
    )
    title = (folder / "cells.md").read_text().splitlines()[0]
    assert title == "# =1+1 swaps"


def test_the_page_says_how_its_numbers_were_computed(home: Path, call: Call) -> None:
    """It names versions."""
    told = call("stage=report", *words(home), status=0)
    page = unescape(Path(told.out.strip()).read_text())
    section = page[page.index('id="details"') :]
    lines = [line.strip() for line in re.sub("<[^>]+>", "\n", section).splitlines()]
    assert any(line.startswith("pipeline ") for line in lines), lines


def test_formulas_in_cells_are_text(tmp_path: Path) -> None:
    from pipeline.report.render.sheets import comma_separated

    text = comma_separated(
        [["=HYPERLINK(1)", "+1", "-x", "@SUM(A1)", "\tx", -1.5, "a=b", "−1", None]]
    )
    (row,) = csv.reader(io.StringIO(text))
    assert row == ["'=HYPERLINK(1)", "'+1", "'-x", "'@SUM(A1)", "'\tx", "-1.5", "a=b", "−1", ""]
