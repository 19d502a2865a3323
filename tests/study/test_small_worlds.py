"""Small worlds: items of their own retrain nothing, and one of the script is a data_root."""

import json
from pathlib import Path

import pytest
import yaml
from fixture_types import Call, Make
from small_world.files import World, write

from pipeline.config.compose import compose
from pipeline.data.rows import read_jsonl
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Run
from pipeline.tables.planned_runs import Planning


@pytest.fixture(scope="module")
def items(make_run: Make, world: Path) -> Path:
    asked = ["expert=sandbox_items", "expert.items.dev=6", "expert.items.test=9"]
    return make_run("stage=data", *asked, f"data_root={world}")


def test_items_are_the_first_of_the_world_and_in_no_training_file(world: Path, items: Path) -> None:
    """The world writes 4 of each.

    6 and 9 begin with these, and none of the 15 is taught in any language.
    """
    for file, more in {"mgsm/qac/dev": 6, "mgsm/qac/test": 9, "flores/qab/devtest": 9}.items():
        few, many = (list(read_jsonl(folder / f"{file}.jsonl")) for folder in (world, items))
        assert len(few) == 4 and len(many) == more and many[:4] == few
    taught = "".join(path.read_text(encoding="utf-8") for path in world.glob("*/train.jsonl"))
    assert len(taught) > 10_000
    for file, column in {
        "mgsm/en/dev": "question",
        "mgsm/en/test": "question",
        "flores/qaa/dev": "sentence",
    }.items():
        for row in read_jsonl(items / f"{file}.jsonl"):
            assert json.dumps(row[column])[1:-1] not in taught
    assert not (items / "orca_math").exists() and not (items / "tokenizer").exists()


def runs_of(tmp_path: Path, table: dict[str, object]) -> dict[str, list[Run]]:
    """stage -> the runs of a table that starts from table=sandbox_full."""
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({"defaults": ["sandbox_full"], "name": "own", **table}))
    planned = Planning.of(compose(["stage=plan", f"runs_dir={tmp_path}/runs", f"table={file}"]))  # type: ignore[arg-type]
    found: dict[str, list[Run]] = {}
    for run in order_runs(planned.targets()):
        found.setdefault(run.config.stage, []).append(run)
    return found


def test_more_test_items_retrain_nothing(tmp_path: Path) -> None:
    """500 items or 400.

    The same trainings and choices, other scores, and these of the items alone.
    """
    few, many = (
        runs_of(tmp_path, {}),
        runs_of(
            tmp_path,
            {
                "runs": {
                    "items": {"stage": "data", "expert": "sandbox_items", "expert.items.test": 400}
                }
            },
        ),
    )
    hashes = [
        {stage: {run.hash for run in runs} for stage, runs in one.items()} for one in (few, many)
    ]
    assert hashes[0]["sft"] == hashes[1]["sft"] and len(hashes[0]["sft"]) == 6
    assert len(hashes[0]["data"] ^ hashes[1]["data"]) == 2  # the items
    roots = {
        run.parents["data_root"].name for run in many["eval"] if run.config.eval.split == "test"
    }
    assert len(roots) == 1 and roots.pop().startswith("data-sandbox_items-")
    chosen_on = {run.hash for run in few["eval"] if run.config.eval.split == "dev"}
    assert chosen_on and chosen_on <= hashes[1]["eval"]
    assert (
        not {run.hash for run in few["eval"] if run.config.eval.split == "test"} & hashes[1]["eval"]
    )


def test_a_world_of_the_script_is_a_data_root(call: Call, tmp_path: Path) -> None:
    """Its items are kept apart from training rows, so no row is dropped for shared words."""
    write(
        tmp_path / "mine",
        World(items=300, dev_items=4, math_rows=400, language_rows=4, documents=0),
    )
    told = call(
        "stage=data", f"runs_dir={tmp_path}/runs", "expert=math", f"data_root={tmp_path}/mine"
    )
    assert told.status == 0 and "400 rows taken of 400" in told.err, told.err
