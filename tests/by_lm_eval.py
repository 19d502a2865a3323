"""What the evaluation harness's own command line answers, in a process of its own."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import forked
import lm_eval
import yaml

STOCK = Path(lm_eval.__file__).parent / "tasks"
# `python -m lm_eval`, without an index of the 14,000 task files that it comes with: tasks here are
# files, or names of those in --include_path
COMMAND = """
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks._index import TaskIndex
build = TaskIndex.build
own = lambda paths: [path for path in paths if path.parent.name != "lm_eval"]
TaskIndex.build = staticmethod(lambda paths, **how: build(own(paths), **how))
cli_evaluate()
"""


def local_files(folder: Path, **splits: str) -> dict[str, Any]:
    """Return the keys of a task file that read local JSONL files instead of the Hub.

    Keys are the names of splits.
    """
    files = {split: str(folder / f"{name}.jsonl") for split, name in splits.items()}
    return {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}


def stock_mgsm(root: Path, code: str, max_gen_toks: int) -> tuple[str, dict[str, Any]]:
    """Return our name and the keys of the harness's MGSM, read from `root`.

    It has native chains of thought and two exemplars.
    """
    file = STOCK / f"mgsm/native_cot/mgsm_native_cot_{code}.yaml"
    until = yaml.safe_load(file.read_text())["generation_kwargs"]["until"]
    return f"mgsm_{code}_2shot", {
        "include": str(file),
        "num_fewshot": 2,
        **local_files(root / "mgsm" / code, train="train", test="test"),
        "fewshot_config": {"sampler": "first_n"},
        "generation_kwargs": {"do_sample": False, "until": until, "max_gen_toks": max_gen_toks},
    }


def answered_by_lm_eval(
    model: Path,
    tasks: Iterable[Path | tuple[str, dict[str, Any]]],
    rows: Mapping[str, list[int]],
    folder: Path,
    *options: str,
    batch_size: int = 16,
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Run `lm_eval run` in float32 on the CPU; return results and the samples of each task.

    `tasks` are task files, or a name and the keys of one. `rows` are the questions of each task, by
    their numbers. `options` are further words of the command line.
    """
    folder.mkdir()
    files = []
    for task in tasks:
        if isinstance(task, tuple):
            name, body = task
            task = folder / f"{name}.yaml"
            task.write_text(yaml.safe_dump({"task": name, **body}, sort_keys=False))
        files.append(str(task))
    command = [
        "-c",
        COMMAND,
        "run",
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model},dtype=float32",
    ]
    command += [
        "--device",
        "cpu",
        "--batch_size",
        str(batch_size),
        "--output_path",
        str(folder / "out"),
    ]
    command += [
        "--log_samples",
        "--tasks",
        ",".join(files),
        "--samples",
        json.dumps(rows),
        *options,
    ]
    imports = "import lm_eval.__main__, lm_eval.evaluator, lm_eval.models.huggingface"
    done = forked.python(
        *command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, timeout=1200, after=imports
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = folder.rglob("results_*.json")
    samples = {}
    for path in folder.rglob("samples_*.jsonl"):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        samples[path.name.removeprefix("samples_").rpartition("_")[0]] = lines
    return json.loads(file.read_text()), samples


def assert_same_answers(
    report: dict[str, Any], folder: Path, stock: dict[str, Any], samples: dict[str, Any]
) -> int:
    """Check that a stage's scores and samples equal the command line's, and return the answers.

    Scores are equal to the digit, likelihoods to 1e-4. `report` is the stage's scores.json, and
    `folder` has samples/.
    """
    compared, scored = 0, set()
    for row in report["rows"]:
        name = f"{row['task']}_{row['pair'] or row['language']}_{row['num_fewshot']}shot"
        if row["metric"] in ("unparsed", "cut_off") or name not in samples:
            continue
        scored.add(name)
        theirs = stock["results"][name]
        assert row["value"] == theirs[f"{row['metric']},{row['filter']}"], row
        if row["stderr"] is not None:
            assert abs(row["stderr"] - theirs[f"{row['metric']}_stderr,{row['filter']}"]) < 1e-12
    assert scored == set(samples)
    parts = report["harness"].get("parts", {"": report["harness"]}).values()
    hashes = {name: digest for part in parts for name, digest in part["task_hashes"].items()}
    for name, of_task in samples.items():
        assert hashes[name] == stock["task_hashes"][name]
        task, where, _ = name.rsplit("_", 2)
        text = (folder / f"samples/{task}.{where}.jsonl").read_text(encoding="utf-8")
        ours = [json.loads(line) for line in text.split("\n") if line]
        chief = [sample for sample in of_task if sample["filter"] == ours[0]["filter"]]
        assert [sample["prompt_hash"] for sample in ours] == [
            sample["prompt_hash"] for sample in chief
        ]
        compared += len(ours)
        for one, other in zip(ours, chief, strict=True):
            if "loglikelihoods" in one:
                theirs = [float(answer[0][0]) for answer in other["resps"]]
                assert (
                    max(
                        abs(a - b)
                        for a, b in zip(one["loglikelihoods"].values(), theirs, strict=True)
                    )
                    < 1e-4
                )
                assert one["correct"] == bool(other["acc"]) and len(theirs) > 1
            else:
                assert one["response"] == other["resps"][0][0]
                assert one["extracted"] == other["filtered_resps"][0].strip()
    return compared
