"""The harness' command line on the same checkpoint and questions, one task of each kind.

This is the slowest test of the folder. It answers from prefixes computed once, whereas the command
line computes each prompt whole.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from by_lm_eval import STOCK, answered_by_lm_eval, assert_same_answers, local_files, stock_mgsm
from made_up import REAL_DATA, Notes, asked, needs_real_data, problem, run_of, write_rows

from pipeline.evaluate.stage import make

LENGTH = 16  # max_gen_toks


@pytest.fixture
def every_kind(data_root: Path) -> Path:
    """Return the made-up benchmarks with real MGSM in Swahili, a known subject, and MBPP."""
    assert REAL_DATA
    (data_root / "mgsm/sw").symlink_to(Path(REAL_DATA).resolve() / "mgsm/sw")
    for task in ("belebele", "flores"):
        (data_root / task / "qac").rename(data_root / task / "sw")
    for split in ("dev", "test"):
        file = data_root / f"global_mmlu/qac/{split}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        write_rows(
            data_root / f"global_mmlu/sw/{split}.jsonl",
            [row | {"subject": "virology"} for row in rows],
        )
    write_rows(data_root / "mbpp/sw/test.jsonl", [problem(number) for number in range(3)])
    return data_root


def theirs(
    root: Path, folder: Path, tiny: Path
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Return the command line's results and samples, by our names of the tasks."""
    bodies: dict[str, dict[str, Any]] = {
        "belebele_sw_2shot": {
            "include": str(STOCK / "belebele/belebele_swh_Latn.yaml"),
            **local_files(root / "belebele/sw", test="test"),
        },
        "global_mmlu_sw_2shot": {
            "include": str(STOCK / "global_mmlu/full/sw/global_mmlu_full_sw_virology.yaml"),
            **local_files(root / "global_mmlu/sw", dev="dev", test="test"),
        },
    }
    ours = folder.parent / "ours/tasks"  # FLORES and MBPP have no stock task that can be read
    tasks = [
        stock_mgsm(root, "sw", LENGTH),
        *((name, {"num_fewshot": 2} | body) for name, body in bodies.items()),
    ]
    tasks += [ours / name for name in ("flores.en-sw.yaml", "mbpp.sw.yaml")]
    rows = {"mgsm_sw_2shot": list(range(60)), "belebele_sw_2shot": list(range(2, 9))}
    rows |= {
        "global_mmlu_sw_2shot": list(range(8)),
        "flores_en-sw_2shot": list(range(6)),
        "mbpp_sw_0shot": [0, 1, 2],
    }
    return answered_by_lm_eval(tiny, tasks, rows, folder)


@needs_real_data
def test_the_command_line_says_the_same(every_kind: Path, tmp_path: Path, tiny: Path) -> None:
    """Prompts, answers, likelihoods, extracted numbers and scores are equal to the digit."""
    tasks = [asked(task, 2) for task in ("mgsm", "belebele", "global_mmlu", "flores")]
    knobs: dict[str, Any] = {
        "max_gen_toks": LENGTH,
        "batch_size": 16,
        "run_code": True,
        "limit": 60,
    }
    run = run_of(tmp_path, tiny, every_kind, *tasks, asked("mbpp", 0), languages=["sw"], **knobs)
    make(run, tmp_path / "ours", Notes())
    (tmp_path / "ours").rename(run.folder)  # task files name their rows there
    (tmp_path / "ours").symlink_to(run.folder)
    stock, stock_samples = theirs(every_kind, tmp_path / "theirs", tiny)

    report = json.loads((tmp_path / "ours/scores.json").read_text())
    assert (
        assert_same_answers(report, tmp_path / "ours", stock, stock_samples) == 60 + 7 + 8 + 6 + 3
    )
    extracted = {sample["filtered_resps"][0] for sample in stock_samples["mgsm_sw_2shot"]}
    assert len(extracted - {"[invalid]"}) > 5  # there is something to agree on
    first = json.loads((tmp_path / "ours/samples/mgsm.sw.jsonl").open(encoding="utf-8").readline())
    assert first["scores"].keys() == {"exact_match", "numeric_match"}
