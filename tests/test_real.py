"""table=real_smoke on real MGSM and GSM8K.

The same stages, real files, a base made from the data.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from fixture_types import Call, Patch

from pipeline.config import conf

pytestmark = pytest.mark.real_data


@pytest.fixture
def smoke(tmp_path: Path, monkeypatch: Patch) -> list[str]:
    """Return the command of table=real_smoke with two steps, two questions and 2,000 rows."""
    copy = tmp_path / "conf"
    shutil.copytree(conf.folder(), copy)
    table = copy / "tables/real_smoke.yaml"
    shipped = yaml.safe_load(table.read_text())
    shipped["score"] |= {"eval.limit": 2, "eval.max_gen_toks": 4}
    shipped["every"] |= {"data.size": 2000}
    table.write_text(yaml.safe_dump(shipped, sort_keys=False))
    recipe = copy / "recipe/smoke.yaml"
    recipe.write_text(re.sub(r"(?m)^steps: .*$", "steps: 2", recipe.read_text()))
    monkeypatch.setattr(conf, "folder", lambda: copy)
    data = os.environ["PIPELINE_TEST_DATA"]
    return [
        "table=real_smoke",
        f"data_root={data}",
        f"runs_dir={tmp_path}/runs",
        "tracking.mode=disabled",
    ]


def test_real_files_pass_through_every_stage(smoke: list[str], call: Call, tmp_path: Path):
    told = call("stage=table", *smoke, status=0)
    page = Path(told.out.strip())
    assert page.is_file() and "Real data through every stage" in page.read_text()
    manifests = {
        folder.parent.name: json.loads(folder.read_text())
        for folder in (tmp_path / "runs").glob("*/manifest.json")
    }
    base = next(one for name, one in manifests.items() if name.startswith("gsm8k_text-cpt"))
    config = json.loads((tmp_path / "runs" / base["name"] / "config.json").read_text())
    assert config["vocab_size"] == 4096 and config["max_position_embeddings"] == 16384
    expert = next(one for name, one in manifests.items() if name.startswith("gsm8k-full"))
    assert expert["facts"]["truncated"] > 0 and "truncates" in told.err  # said, not silent
    assert base["facts"]["dataset_tokens"] > 200_000
    samples = next((tmp_path / "runs").glob("eval-mgsm_2shot-gsm8k-full*/samples/*te*.jsonl"))
    first = json.loads(samples.read_text().splitlines()[0])
    problem = json.loads(
        (Path(os.environ["PIPELINE_TEST_DATA"]) / "mgsm/te/test.jsonl").open().readline()
    )
    assert first["prompt"].count("ప్రశ్న:") == 3 and problem["question"] in first["prompt"]


def test_without_data_and_hub_it_says_what_to_do(call: Call, tmp_path: Path):
    told = call("stage=table", "table=real_smoke", f"runs_dir={tmp_path}/runs")
    assert told.status == 1 and "set data_root=FOLDER to read local files" in told.err
    assert not list((tmp_path / "runs").glob("*/manifest.json"))
