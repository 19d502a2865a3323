"""The tables that are shipped.

Each expands, names options that exist, and has a cell for each published number.
"""

import csv
import gzip
import io
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from planned import CONF, TABLES, plan_of

from pipeline.benchmarks import primary_metric
from pipeline.config.training import Sft
from pipeline.tables.plan import TablePlan
from pipeline.train.steps import SIDES, steps_of

RESULTS = Path(__file__).parents[2] / "results"
NAMES = sorted(path.stem for path in TABLES.glob("*.yaml"))
LAYER_SWAPPING = ("table1", "table2", "table5", "table6", "claims", "figures")
UNREASONABLE = (
    "table1",
    "table2",
    "table3",
    "table_a1",
    "table_a2",
    "table_a3",
    "table_a8",
    "bars",
    "correlations",
    "friedman",
)


def test_each_table_of_both_papers_is_there() -> None:
    wanted = {f"layer_swapping_{table}" for table in LAYER_SWAPPING} | {
        f"unreasonable_{table}" for table in UNREASONABLE
    }
    wanted |= {
        "calibrate",
        "calibrate_steps",
        "node_check",
        "sandbox_layer_swapping",
        "sandbox_unreasonable",
    }
    wanted |= {"native_reasoning", "adaptive_swap", "merging_pool"}  # papers that followed
    wanted |= {
        "sandbox",
        "sandbox_dev",
        "sandbox_full",
        "real_smoke",
        "layer_swapping_sw",
        "unreasonable_lora_sw",
    }
    assert wanted | {"laptop_real", "laptop_real_full", "laptop_translations"} == set(NAMES)


def numbers(
    table: dict[str, Any], rows: dict[str, Any] | None = None, above: str = ""
) -> dict[tuple[str, str], float]:
    """Return (row, column) -> published number. Rows inside rows have dotted names."""
    found: dict[tuple[str, str], float] = {}
    for name, row in (table if rows is None else rows).items():
        if name in ("metric", "columns", "suspect"):
            continue
        if isinstance(row, dict):
            found |= numbers(table, row, f"{above}{name}.")
        else:
            cells = zip(table["columns"], row, strict=True)
            found |= {
                (f"{above}{name}", column): value for column, value in cells if value is not None
            }
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
    base = {
        row
        for row in published("layer_swapping.table5")
        if row[1] == "base" and row[0].startswith("mgsm")
    }
    assert places(made, "layer_swapping.table5") == base - {
        ("mgsm_8shot_exact_match.ten_language_avg", "base")
    }
    models = {row for row in published("unreasonable.table_a8") if row[1].startswith("mgsm")}
    assert len(models) == 16 and places(made, "unreasonable.table_a8") >= models
    assert not any(spec.words.get("stage") for spec in made.specs.values())  # nothing is trained


@pytest.mark.parametrize("name", ["sandbox", "sandbox_full", "sandbox_dev"])
def test_the_small_worlds_tables_have_the_cells_of_the_committed_results(name: str) -> None:
    """results/NAME/cells.csv has the plan's cells with the means over seeds of results.csv."""
    made = plan_of(name)
    cells = committed(name, "cells.csv")
    assert [(cell["row"], cell["column"]) for cell in cells] == list(made.cells)
    scores: dict[tuple[str, str, str, str], list[float]] = {}
    for row in committed(name, "results.csv"):
        if (row["metric"], row["filter"]) == primary_metric(row["task"]) and not row["subject"]:
            scores.setdefault((row["run"], row["task"], row["language"], row["pair"]), []).append(
                float(row["value"])
            )
    for cell in cells:
        planned = made.cells[cell["row"], cell["column"]]
        asked = {
            score
            for item in planned.items
            for reading in item.readings
            for score in reading.values()
        }
        ((task, language),) = {(str(one.words.get("task", "mgsm")), one.language) for one in asked}
        runs, pair = cell["runs"].split(), planned.pair or ""
        numbers = [number for run in runs for number in scores[run, task, language, pair]]
        assert len(numbers) == int(cell["n"]) and float(cell["value"]) == pytest.approx(
            statistics.fmean(numbers)
        ), cell


def committed(name: str, file: str) -> list[dict[str, str]]:
    path = RESULTS / name / file
    text = (
        path.read_text()
        if path.is_file()
        else gzip.decompress(path.with_name(f"{file}.gz").read_bytes()).decode()
    )
    return list(csv.DictReader(io.StringIO(text)))


def test_the_demo_chooses_on_development_problems_of_one_seed_and_scores_what_it_chose() -> None:
    """11 swaps and 3 densities are scored once on development problems.

    Two models are scored on the test problems.
    """
    for name in ("sandbox", "sandbox_full"):
        made = plan_of(name)
        choices = list(made.choices.values())
        assert sorted(len(choice.candidates) for choice in choices) == [3, 11]
        chosen_by = {
            score for choice in choices for scores in choice.candidates.values() for score in scores
        }
        assert len(chosen_by) == 14 and {score.language for score in chosen_by} == {"qac"}
        assert all(score.words["eval.split"] == "dev" for score in chosen_by)
        assert chosen_by <= set(made.scores)
        tested = {score.model for score in made.scores} - {score.model for score in chosen_by}
        assert not any(
            "counts=" in model or "density=" in model for model in tested if model in made.specs
        )
    assert {score.model for score in plan_of("sandbox_dev").scores} >= {
        score.model for score in chosen_by
    }


def test_reset_and_sparse_merges_name_what_they_give_back() -> None:
    """unreasonable table 2 resets the language side.

    layer_swapping 3.3 resets the first five and last two of 32 layers.
    """
    resets = [
        spec.words for spec in plan_of("unreasonable_table2").specs.values() if spec.kind == "merge"
    ]
    assert {words["partition"] for words in resets} == set("ABCZ") and {
        words["merge.side"] for words in resets
    } == {"language"}
    claims = [
        spec.words
        for spec in plan_of("layer_swapping_claims").specs.values()
        if spec.words.get("merge") == "reset"
    ]
    assert [0, 1, 2, 3, 4, 30, 31] in [words.get("merge.layers") for words in claims]


def test_all_rows_of_table_a3_train_for_the_same_steps_of_each_side() -> None:
    """One pass of 78,000 rows a side would be 2,436 steps with 1 a switch and 2,000 with 1,000."""
    trained = [
        spec.words
        for spec in plan_of("unreasonable_table_a3").specs.values()
        if "sft.steps_per_switch" in spec.words
    ]
    rows, found = dict.fromkeys(SIDES, 78_000), []
    for words in trained:
        sft = Sft(
            batch_size=64,
            epochs=1,
            steps=words["sft.steps"],
            steps_per_switch=words["sft.steps_per_switch"],
        )
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
