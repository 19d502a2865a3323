"""The prompts are the stock tasks', byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from made_up import Scripted, asked, choice, needs_real_data

from pipeline.evaluate.definitions import task_definitions
from pipeline.evaluate.harness import _harness_tamed, load_tasks, score

STOCK = Path(lm_eval.__file__).parent / "tasks"


def stock_prompts(folder: Path, stock: str, shots: int, rows: Any = None, **changes: Any) -> list[str]:
    """What the harness asks by its own task, told only where the data lies and to take the exemplars in order."""
    folder.mkdir()
    body = {"include": str(STOCK / stock), "task": "stock", "dataset_path": "json", "dataset_name": None}
    body |= {"num_fewshot": shots, "fewshot_config": {"sampler": "first_n"}} | changes
    (folder / "stock.yaml").write_text(yaml.safe_dump(body, sort_keys=False))  # the split with all columns first
    lm = Scripted()
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    with _harness_tamed():  # a minute less
        chosen = rows and {"stock": rows}
        simple_evaluate(model=lm, tasks=["stock"], task_manager=manager, samples=chosen, bootstrap_iters=0)
    return lm.prompts


def our_prompts(folder: Path, task: str, shots: int, code: str, data_root: Path, limit: int | None = None) -> list[str]:
    lm = Scripted()
    definitions = task_definitions([asked(task, shots)], [code], data_root, folder)
    score(lambda: lm, definitions, load_tasks(definitions), choice(limit=limit))
    return lm.prompts


@needs_real_data
@pytest.mark.parametrize("shots", [2, 8])
@pytest.mark.parametrize("code", ["sw", "bn", "te", "en"])
def test_mgsm_is_the_stock_task(tmp_path: Path, real_data: Path, code: str, shots: int) -> None:
    files = {split: str(real_data / "mgsm" / code / f"{split}.jsonl") for split in ("train", "test")}
    stock = f"mgsm/native_cot/mgsm_native_cot_{code}.yaml"
    theirs = stock_prompts(tmp_path / "stock", stock, shots, dataset_kwargs={"data_files": files})
    ours = our_prompts(tmp_path / "ours", "mgsm", shots, code, real_data)
    assert len(ours) == 250 and ours == theirs
    assert ours[0].count("\n\n") == shots


@needs_real_data
@pytest.mark.parametrize("code", ["ja", "de", "fr", "zh", "ru", "es", "th"])
def test_every_other_language_of_mgsm_is_read(tmp_path: Path, real_data: Path, code: str) -> None:
    assert len(our_prompts(tmp_path, "mgsm", 8, code, real_data, limit=2)) == 2


def test_constructed_languages_have_the_english_words_around_them(tmp_path: Path, data_root: Path) -> None:
    prompt = our_prompts(tmp_path / "tasks", "mgsm", 1, "qac", data_root, limit=1)[0]
    shot = "Question: 1?\nStep-by-Step Answer: So. The answer is 1.\n\n"
    assert prompt == shot + "Question: test problem 0 in qac\nStep-by-Step Answer:"


@pytest.mark.parametrize("shots", [0, 3])
def test_belebele_is_the_stock_task_without_its_exemplars(tmp_path: Path, data_root: Path, shots: int) -> None:
    files = {"test": str(data_root / "belebele/en/test.jsonl")}
    stock = "belebele/belebele_eng_Latn.yaml"
    theirs = stock_prompts(
        tmp_path / "stock", stock, shots, list(range(shots, 9)), dataset_kwargs={"data_files": files}
    )
    ours = our_prompts(tmp_path / "ours", "belebele", shots, "qac", data_root)
    assert len(ours) == 4 * (9 - shots) and ours == theirs
    assert all(prompt.startswith("P: Passage 0.\nQ: Which 0?\nA: option 0.1") for prompt in ours[:4])


@pytest.mark.parametrize("shots", [0, 2])
def test_global_mmlu_is_the_stock_task_of_the_subject(tmp_path: Path, data_root: Path, shots: int) -> None:
    folder = tmp_path / "virology"  # a subject's stock task keeps its own subject's rows
    for split in ("dev", "test"):
        text = (
            (data_root / f"global_mmlu/en/{split}.jsonl")
            .read_text()
            .replace('"subject": "homes"', '"subject": "virology"')
        )
        (folder / "global_mmlu/en").mkdir(parents=True, exist_ok=True)
        (folder / f"global_mmlu/en/{split}.jsonl").write_text(text)
    files = {split: str(folder / f"global_mmlu/en/{split}.jsonl") for split in ("dev", "test")}
    stock = "global_mmlu/full/en/global_mmlu_full_en_virology.yaml"
    theirs = stock_prompts(tmp_path / "stock", stock, shots, dataset_kwargs={"data_files": files})
    ours = our_prompts(tmp_path / "ours", "global_mmlu", shots, "en", folder)
    assert len(theirs) == 4 * 3 and len(ours) == 4 * 8 and ours[: 4 * 3] == theirs


def test_flores_names_both_languages(tmp_path: Path, data_root: Path) -> None:
    prompts = our_prompts(tmp_path / "tasks", "flores", 1, "qac", data_root)
    assert prompts[0] == (
        "English: en dev says the word number 0 here.\nQac: qac dev says the word number 0 here.\n\n"
        "English: en devtest says the word number 0 here.\nQac:"
    )
    # The rows of the two files are in different orders: the id joins them.
    assert prompts[6].endswith("Qac: qac devtest says the word number 5 here.\nEnglish:")
