"""The tables that are shipped: each expands, names options that exist, and has a cell for each published number."""

from __future__ import annotations

import csv
import gzip
import io
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from planned import CONF, TABLES, plan, plan_of

from pipeline.benchmarks import primary_metric
from pipeline.commands.plan import empty_spbleu, published_lines
from pipeline.config.compose import compose
from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.tables.plan import TablePlan
from pipeline.tables.planned_runs import Planning
from pipeline.train.steps import SIDES, steps_of

RESULTS = Path(__file__).parents[2] / "results"
NAMES = sorted(path.stem for path in TABLES.glob("*.yaml"))
LAYER_SWAPPING = ("table1", "table2", "table5", "table6", "claims", "figures")
UNREASONABLE = ("table1", "table2", "table3", "table_a1", "table_a2", "table_a3", "table_a8", "bars", "correlations",
                "friedman")  # fmt: skip
GROUPS = ("model", "expert", "mixture", "sft", "partition", "recipe", "merge", "select", "eval")


def test_each_table_of_both_papers_is_there() -> None:
    wanted = {f"layer_swapping_{table}" for table in LAYER_SWAPPING} | {
        f"unreasonable_{table}" for table in UNREASONABLE
    }
    wanted |= {"calibrate", "calibrate_steps", "sandbox_layer_swapping", "sandbox_unreasonable"}
    wanted |= {"sandbox", "sandbox_dev", "sandbox_full", "real_smoke"}
    assert wanted | {
        "laptop_real",
        "laptop_real_full",
        "laptop_translations",
    } == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_short_and_names_options_that_there_are(name: str) -> None:
    assert len((TABLES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()) <= 50
    made = plan_of(name)
    assert made.table.name == name and made.cells
    words = [spec.words for spec in made.specs.values()] + [dict(score.words) for score in made.scores]
    for group in GROUPS:
        options = {str(one[group]) for one in words if one.get(group) is not None}
        missing = [option for option in options if not (CONF / group / f"{option}.yaml").is_file()]
        assert not missing, f"{group}: {missing}"


def numbers(table: dict[str, Any], rows: dict[str, Any] | None = None, above: str = "") -> dict[tuple[str, str], float]:
    """(row, column) -> published number, rows inside rows by dotted names; what is not reported is not there."""
    found: dict[tuple[str, str], float] = {}
    for name, row in (table if rows is None else rows).items():
        if name in ("metric", "columns", "suspect"):
            continue
        if isinstance(row, dict):
            found |= numbers(table, row, f"{above}{name}.")
        else:
            cells = zip(table["columns"], row, strict=True)
            found |= {(f"{above}{name}", column): value for column, value in cells if value is not None}
    return found


def published(path: str) -> dict[tuple[str, str], float]:
    file = CONF.parent / "src/pipeline/papers/tables.yaml"
    paper, table = path.split(".")
    return numbers(yaml.safe_load(file.read_text(encoding="utf-8"))[paper][table])


def places(made: TablePlan, path: str) -> set[tuple[str, str]]:
    """(row, column) of the published table that cells stand beside."""
    told = [cell.published for cell in made.cells.values() if cell.published]
    return {(row, column) for table, row, column in told if table == path}


@pytest.mark.parametrize("name", [name for name in NAMES if plan_of(name).table.published])
def test_cells_are_the_published_numbers_and_no_others(name: str) -> None:
    made = plan_of(name)
    path = made.table.published
    assert path == name.replace("_table", ".table") and places(made, path) == published(path).keys()


def test_calibrate_stands_beside_the_base_rows_of_both_papers() -> None:
    made = plan_of("calibrate")
    base = {row for row in published("layer_swapping.table5") if row[1] == "base" and row[0].startswith("mgsm")}
    assert places(made, "layer_swapping.table5") == base - {("mgsm_8shot_exact_match.ten_language_avg", "base")}
    models = {row for row in published("unreasonable.table_a8") if row[1].startswith("mgsm")}
    assert len(models) == 16 and places(made, "unreasonable.table_a8") >= models
    assert not any(spec.words.get("stage") for spec in made.specs.values())  # nothing is trained


def test_what_a_paper_does_not_print_is_empty_and_named_by_the_plan() -> None:
    """Japanese of calibrate's four Instruct models: after all of their scoring it ended the report."""
    made = plan_of("calibrate")
    assert {column for table, _, column in made.unprinted if table == "unreasonable.table_a8"} == {"mgsm_ja"}
    assert made.cells["qwen2.5_7b_instruct.ja", "first_n"].published is None
    (told,) = [line for line in published_lines(made) if "table_a8" in line]
    assert told.startswith("published: unreasonable.table_a8 for 48 cells; not printed there, so left empty: ")
    assert told.endswith("falcon3_7b_instruct mgsm_ja")


def test_cells_without_a_model_for_spbleu_are_named_by_the_plan(tmp_path: Path) -> None:
    """Four languages, both directions, of three rows."""
    words = ["stage=plan", "table=layer_swapping_table5"]
    (told,) = empty_spbleu(Planning.of(compose(words)))  # type: ignore[arg-type]
    assert told.startswith("24 cells of spBLEU will be empty: give every.eval.spm_model=FILE")
    (tmp_path / "spm.model").write_bytes(b"pieces")
    given = f"every.eval.spm_model={tmp_path / 'spm.model'}"
    assert empty_spbleu(Planning.of(compose([*words, given]))) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("published", "problem"),
    [
        ("unreasonable.table_a9", "published: there is no unreasonable.table_a9: did you mean unreasonable.table_a8"),
        ("unreasonable.table_a8", "published: unreasonable.table_a8 has no row 'sw': there are llama3.1_8b_instruct"),
        ("unreasonable.partitions", "is not a table of numbers"),
    ],
)
def test_a_published_name_that_means_nothing_is_refused_by_the_plan(published: str, problem: str) -> None:
    with pytest.raises(PipelineError) as told:
        plan(f"defaults: [unreasonable_table3]\nname: mine\npublished: {published}\n")
    assert problem in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize(("name", "languages", "seeds", "controls"), [("sandbox", 1, 1, 4), ("sandbox_full", 3, 3, 0)])
def test_the_demo_has_the_cells_that_it_had(name: str, languages: int, seeds: int, controls: int) -> None:
    """Base, two experts, four merges and their controls; four tasks in English and in the language, FLORES in both
    directions; a number a seed but for the base."""
    made = plan_of(name)
    rows = 7 + controls
    assert len(made.rows) == rows and len(made.columns) == languages * 8 and len(made.cells) == rows * languages * 8
    items = {len(cell.items) for (row, _), cell in made.cells.items() if row != "base"}
    assert items == {seeds}


@pytest.mark.parametrize("name", ["sandbox", "sandbox_full", "sandbox_dev"])
def test_the_small_worlds_tables_have_the_cells_of_the_committed_results(name: str) -> None:
    """results/NAME/cells.csv has the plan's cells in its order, each with the number of its language and task in
    results.csv: the mean over its seeds."""
    made = plan_of(name)
    cells = committed(name, "cells.csv")
    assert [(cell["row"], cell["column"]) for cell in cells] == list(made.cells)
    scores: dict[tuple[str, str, str, str], list[float]] = {}
    for row in committed(name, "results.csv"):
        if (row["metric"], row["filter"]) == primary_metric(row["task"]) and not row["subject"]:
            scores.setdefault((row["run"], row["task"], row["language"], row["pair"]), []).append(float(row["value"]))
    for cell in cells:
        task, language, pair = meant(made, cell["row"], cell["column"])
        numbers = [number for run in cell["runs"].split() for number in scores[run, task, language, pair]]
        assert len(numbers) == int(cell["n"]) and float(cell["value"]) == pytest.approx(statistics.fmean(numbers)), cell


def committed(name: str, file: str) -> list[dict[str, str]]:
    path = RESULTS / name / file
    text = path.read_text() if path.is_file() else gzip.decompress(path.with_name(f"{file}.gz").read_bytes()).decode()
    return list(csv.DictReader(io.StringIO(text)))


def meant(made: TablePlan, row: str, column: str) -> tuple[str, str, str]:
    """(task, language, pair) that a cell of the plan scores."""
    cell = made.cells[row, column]
    scores = {score for item in cell.items for reading in item.readings for score in reading.values()}
    ((task, language),) = {(dict(one.words).get("task", "mgsm"), one.language) for one in scores}
    return str(task), language, cell.pair or ""


def test_the_demo_chooses_on_development_problems_of_one_seed_and_scores_what_it_chose() -> None:
    """11 swaps and 3 densities are scored once on development problems, two models on the test problems."""
    for name in ("sandbox", "sandbox_full"):
        made = plan_of(name)
        choices = list(made.choices.values())
        assert sorted(len(choice.candidates) for choice in choices) == [3, 11]
        chosen_by = {score for choice in choices for scores in choice.candidates.values() for score in scores}
        assert len(chosen_by) == 14 and {score.language for score in chosen_by} == {"qac"}
        assert all(dict(score.words)["eval.split"] == "dev" for score in chosen_by)
        assert chosen_by <= set(made.scores)
        tested = {score.model for score in made.scores} - {score.model for score in chosen_by}
        assert not any("counts=" in model or "density=" in model for model in tested if model in made.specs)
    assert {score.model for score in plan_of("sandbox_dev").scores} >= {score.model for score in chosen_by}


def test_reset_and_sparse_merges_name_what_they_give_back() -> None:
    """unreasonable table 2 resets the language side, layer_swapping 3.3 the first five and last two of 32 layers."""
    resets = [spec.words for spec in plan_of("unreasonable_table2").specs.values() if spec.kind == "merge"]
    assert {words["partition"] for words in resets} == set("ABCZ") and {words["merge.side"] for words in resets} == {
        "language"
    }
    claims = [
        spec.words for spec in plan_of("layer_swapping_claims").specs.values() if spec.words.get("merge") == "reset"
    ]
    assert [0, 1, 2, 3, 4, 30, 31] in [words.get("merge.layers") for words in claims]


def test_all_rows_of_table_a3_train_for_the_same_steps_of_each_side() -> None:
    """One pass of 78,000 rows a side would be 2,436 steps with 1 a switch and 2,000 with 1,000."""
    trained = [
        spec.words for spec in plan_of("unreasonable_table_a3").specs.values() if "sft.steps_per_switch" in spec.words
    ]
    rows, found = dict.fromkeys(SIDES, 78_000), []
    for words in trained:
        sft = Sft(batch_size=64, epochs=1, steps=words["sft.steps"], steps_per_switch=words["sft.steps_per_switch"])
        found.append(steps_of(sft, rows)[0])
    assert found == 4 * [{"math": 1000, "language": 1000}]


def test_the_swaps_of_soups_are_of_all_experts() -> None:
    """layer_swapping table 6: three math experts souped, and three of a language or all twelve."""
    made = plan_of("layer_swapping_table6")
    sizes = {
        (len(spec.words["merge.math"]), len(spec.words["merge.language"]))
        for spec in made.specs.values()
        if isinstance(spec.words.get("merge.math"), list)
    }
    assert sizes == {(3, 3), (3, 12)}


def test_the_example_of_the_documentation_is_a_table() -> None:
    """Three math trainings, six of languages, 18 merges, a model from elsewhere and the base, as the text says."""
    text = (CONF.parent / "docs" / "tables.md").read_text(encoding="utf-8")
    example, _ = re.findall(r"```yaml[^\n]*\n(.*?)```", text, re.DOTALL)  # the other lies over a shipped table
    made = plan(example)
    runs = [spec.run for spec in made.specs.values()]
    assert [runs.count(name) for name in ("math", "language", "swap", "theirs", "base")] == [3, 6, 18, 1, 1]
    assert len(made.cells) == len(made.rows) * len(made.columns) == 4 * 6
