"""What the harness' own command line says of the same checkpoint and questions, one task of each kind.

The slowest test of the room. It answers from prefixes computed once, where the command line computes each prompt whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from made_up import REAL_DATA, Notes, asked, needs_real_data, problem, run_of, write_rows

from pipeline.evaluate.stage import make

STOCK = Path(lm_eval.__file__).parent / "tasks"
LENGTH = 16  # max_gen_toks


@pytest.fixture
def every_kind(data_root: Path) -> Path:
    """The made-up benchmarks, with the real MGSM in Swahili, a subject that the harness knows, and MBPP."""
    assert REAL_DATA
    (data_root / "mgsm/sw").symlink_to(Path(REAL_DATA).resolve() / "mgsm/sw")
    for task in ("belebele", "flores"):
        (data_root / task / "qac").rename(data_root / task / "sw")
    for split in ("dev", "test"):
        file = data_root / f"global_mmlu/qac/{split}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        write_rows(data_root / f"global_mmlu/sw/{split}.jsonl", [row | {"subject": "virology"} for row in rows])
    write_rows(data_root / "mbpp/sw/test.jsonl", [problem(number) for number in range(3)])
    return data_root


def theirs(root: Path, folder: Path, tiny: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The command line's results and samples, by our names of the tasks."""

    def local(task: str, **splits: str) -> dict[str, Any]:
        files = {split: str(root / task / "sw" / f"{name}.jsonl") for split, name in splits.items()}
        return {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}

    mgsm = STOCK / "mgsm/native_cot/mgsm_native_cot_sw.yaml"
    until = yaml.safe_load(mgsm.read_text())["generation_kwargs"]["until"]
    first = {"fewshot_config": {"sampler": "first_n"}}
    bodies: dict[str, dict[str, Any]] = {
        "mgsm_sw_2shot": {"include": str(mgsm), **local("mgsm", train="train", test="test"), **first},
        "belebele_sw_2shot": {
            "include": str(STOCK / "belebele/belebele_swh_Latn.yaml"),
            **local("belebele", test="test"),
        },
        "global_mmlu_sw_2shot": {
            "include": str(STOCK / "global_mmlu/full/sw/global_mmlu_full_sw_virology.yaml"),
            **local("global_mmlu", dev="dev", test="test"),
        },
    }
    bodies["mgsm_sw_2shot"]["generation_kwargs"] = {"do_sample": False, "until": until, "max_gen_toks": LENGTH}
    folder.mkdir()
    files = []
    for name, body in bodies.items():
        files.append(folder / f"{name}.yaml")
        body = {"task": name, "num_fewshot": 2} | body
        files[-1].write_text(yaml.safe_dump(body, sort_keys=False))
    ours = folder.parent / "ours/tasks"  # FLORES and MBPP have no stock task that can be read
    files += [ours / name for name in ("flores.en-sw.yaml", "mbpp.sw.yaml")]
    asks = {"mgsm_sw_2shot": list(range(60)), "belebele_sw_2shot": list(range(2, 9))}
    command = ["-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={tiny},dtype=float32"]
    command += ["--device", "cpu", "--batch_size", "16", "--output_path", str(folder / "out"), "--log_samples"]
    rows = {"global_mmlu_sw_2shot": list(range(8)), "flores_en-sw_2shot": list(range(6)), "mbpp_sw_0shot": [0, 1, 2]}
    command += ["--tasks", ",".join(map(str, files)), "--samples", json.dumps(asks | rows)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = folder.rglob("results_*.json")
    samples = {}
    for path in folder.rglob("samples_*.jsonl"):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        samples[path.name.removeprefix("samples_").rpartition("_")[0]] = lines
    return json.loads(file.read_text()), samples


@needs_real_data
def test_the_command_line_says_the_same(every_kind: Path, tmp_path: Path, tiny: Path) -> None:
    """The same prompts, answers and likelihoods, the same numbers read from them, the same scores, to the digit."""
    tasks = [asked(task, 2) for task in ("mgsm", "belebele", "global_mmlu", "flores")]
    knobs: dict[str, Any] = {"max_gen_toks": LENGTH, "batch_size": 16, "run_code": True, "limit": 60}
    run = run_of(tmp_path, tiny, every_kind, *tasks, asked("mbpp", 0), languages=["sw"], **knobs)
    make(run, tmp_path / "ours", Notes())
    stock, stock_samples = theirs(every_kind, tmp_path / "theirs", tiny)

    report = json.loads((tmp_path / "ours/scores.json").read_text())
    rows = [row for row in report["rows"] if row["metric"] not in ("unparsed", "cut_off") and row["pair"] != "sw-en"]
    assert len(rows) >= 2 + 2 + 2 + 2 + 1
    for row in rows:
        name = f"{row['task']}_{row['pair'] or row['language']}_{row['num_fewshot']}shot"
        assert row["value"] == stock["results"][name][f"{row['metric']},{row['filter']}"], row
        if row["stderr"] is not None:
            assert row["stderr"] == pytest.approx(stock["results"][name][f"{row['metric']}_stderr,{row['filter']}"])
    for name, samples in stock_samples.items():
        assert report["harness"]["task_hashes"][name] == stock["task_hashes"][name]
        task, where, _ = name.rsplit("_", 2)
        text = (tmp_path / f"ours/samples/{task}.{where}.jsonl").read_text(encoding="utf-8")
        ours = [json.loads(line) for line in text.split("\n") if line]
        chief = [sample for sample in samples if sample["filter"] == ours[0]["filter"]]
        assert [sample["prompt_hash"] for sample in ours] == [sample["prompt_hash"] for sample in chief]
        if "loglikelihoods" in ours[0]:
            found = [list(sample["loglikelihoods"].values()) for sample in ours]
            asked_of = [[float(answer[0][0]) for answer in sample["resps"]] for sample in chief]
            assert [value for row in found for value in row] == pytest.approx(sum(asked_of, []), abs=1e-4)
        else:
            assert [sample["response"] for sample in ours] == [sample["resps"][0][0] for sample in chief]
            assert [sample["extracted"] for sample in ours] == [sample["filtered_resps"][0].strip() for sample in chief]
        if task == "mgsm":
            assert len({sample["extracted"] for sample in ours} - {"[invalid]"}) > 5  # there is something to agree on
            assert ours[0]["scores"].keys() == {"exact_match", "numeric_match"}
