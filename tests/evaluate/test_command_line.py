"""What the harness' own command line says of the same checkpoint and problems. The slowest test of the room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lm_eval
import yaml
from made_up import asked, needs_real_data

from pipeline.evaluate import harness

STOCK = Path(lm_eval.__file__).parent / "tasks/mgsm/native_cot/mgsm_native_cot_sw.yaml"


@needs_real_data
def test_the_command_line_says_the_same(real_data: Path, tmp_path: Path, tiny: Path) -> None:
    """All 250 problems in Swahili, 2 exemplars: the same answers, the same numbers read from them, the same score."""
    files = {split: str(real_data / "mgsm/sw" / f"{split}.jsonl") for split in ("train", "test")}
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    body = {"include": str(STOCK), "task": "stock", "dataset_path": "json", "dataset_name": None}
    body |= {
        "dataset_kwargs": {"data_files": files},
        "num_fewshot": 2,
        "fewshot_config": {"sampler": "first_n"},
    }
    until = yaml.safe_load(STOCK.read_text())["generation_kwargs"]["until"]
    body["generation_kwargs"] = {"do_sample": False, "until": until, "max_gen_toks": 16}
    (theirs / "stock.yaml").write_text(yaml.safe_dump(body, sort_keys=False))
    command = ["-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={tiny},dtype=float32"]
    command += ["--tasks", str(theirs / "stock.yaml"), "--device", "cpu", "--batch_size", "16"]
    command += ["--output_path", str(theirs / "out"), "--log_samples"]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = theirs.rglob("results_*.json")
    stock = json.loads(file.read_text())
    (file,) = theirs.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]

    choice = SimpleNamespace(
        tasks=[asked("mgsm", 2)], split="test", limit=None, max_gen_toks=16, batch_size=16, dtype="auto"
    )
    config = SimpleNamespace(eval=choice, languages=["sw"], data_root=str(real_data))
    run = SimpleNamespace(config=config, parents={"checkpoint": SimpleNamespace(folder=tiny)})
    harness.make(run, tmp_path / "ours", SimpleNamespace(summary=lambda found: None))
    text = (tmp_path / "ours/samples/mgsm.sw.jsonl").read_text(encoding="utf-8")
    ours = [json.loads(line) for line in text.split("\n") if line]
    report = json.loads((tmp_path / "ours/scores.json").read_text())

    flexible = [sample for sample in samples if sample["filter"] == "flexible-extract"]
    assert len(ours) == len(flexible) == 250
    assert len({sample["extracted"] for sample in ours} - {"[invalid]"}) > 20  # there is something to agree on
    assert [sample["response"] for sample in ours] == [sample["resps"][0][0] for sample in flexible]
    assert [sample["extracted"] for sample in ours] == [sample["filtered_resps"][0] for sample in flexible]
    assert [sample["prompt_hash"] for sample in ours] == [sample["prompt_hash"] for sample in flexible]
    for row in report["rows"][:2]:
        assert row["value"] == stock["results"]["stock"][f"exact_match,{row['filter']}"]
        assert abs(row["stderr"] - stock["results"]["stock"][f"exact_match_stderr,{row['filter']}"]) < 1e-12
    assert report["harness"]["task_hashes"] == {"mgsm_sw_2shot": stock["task_hashes"]["stock"]}
