"""The prompts are the stock tasks', byte for byte."""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from made_up import Scripted, asked, choice, needs_real_data, none_stored, worked, write_rows

from pipeline.errors import PipelineError
from pipeline.evaluate.prompts import harness_tamed, load_tasks
from pipeline.evaluate.score import score_tasks
from pipeline.evaluate.tasks import task_specs
from pipeline.hub import reach
from pipeline.hub.lock import Lock

STOCK = Path(lm_eval.__file__).parent / "tasks"


def stock_prompts(
    folder: Path, stock: str, shots: int, rows: Any = None, **changes: Any
) -> list[str]:
    """Return the prompts of the harness' own task.

    Only the place of the data and the order of exemplars are set.
    """
    folder.mkdir()
    body = {
        "include": str(STOCK / stock),
        "task": "stock",
        "dataset_path": "json",
        "dataset_name": None,
    }
    body |= {"num_fewshot": shots, "fewshot_config": {"sampler": "first_n"}} | changes
    (folder / "stock.yaml").write_text(
        yaml.safe_dump(body, sort_keys=False)
    )  # the split with all columns first
    lm = Scripted()
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    with harness_tamed():  # a minute less
        chosen = rows and {"stock": rows}
        simple_evaluate(
            model=lm, tasks=["stock"], task_manager=manager, samples=chosen, bootstrap_iters=0
        )
    return lm.prompts


def our_prompts(
    folder: Path,
    task: str,
    shots: int,
    code: str,
    data_root: Path | None,
    limit: int | None = None,
    **how: Any,
) -> list[str]:
    lm = Scripted()
    definitions = task_specs(choice(asked(task, shots), **how), [code], data_root, folder)
    score_tasks(
        lm,
        definitions,
        load_tasks(definitions, Lock()),
        choice(limit=limit, **how),
        none_stored(folder),
    )
    return lm.prompts


@needs_real_data
@pytest.mark.parametrize("shots", [2, 8])
def test_random_exemplars_are_those_that_the_harness_draws(
    tmp_path: Path, real_data: Path, shots: int
) -> None:
    """The stock task as it is.

    With the harness' own sampler and seed, another draw for each question.
    """
    files = {split: str(real_data / "mgsm/sw" / f"{split}.jsonl") for split in ("train", "test")}
    changes = {"dataset_kwargs": {"data_files": files}, "fewshot_config": {"sampler": "default"}}
    theirs = stock_prompts(
        tmp_path / "stock", "mgsm/native_cot/mgsm_native_cot_sw.yaml", shots, **changes
    )
    assert (
        our_prompts(tmp_path / "ours", "mgsm", shots, "sw", real_data, exemplars="random") == theirs
    )
    assert theirs[0].split("\n\n")[0] != theirs[1].split("\n\n")[0] or shots == 8


KINDS = {
    "native_cot": "mgsm",
    "en_cot": "mgsm_en_cot",
    "direct": "mgsm_direct",
}  # the harness' name -> ours


@needs_real_data
@pytest.mark.parametrize(
    ("kind", "code", "shots"),
    [
        *[("native_cot", code, shots) for code in ("sw", "bn", "te", "en") for shots in (2, 8)],
        *[("en_cot", "te", 8), ("en_cot", "ja", 8), ("direct", "sw", 8), ("direct", "th", 8)],
    ],
)
def test_mgsm_is_the_stock_task(
    tmp_path: Path, real_data: Path, kind: str, code: str, shots: int
) -> None:
    files = {
        split: str(real_data / "mgsm" / code / f"{split}.jsonl") for split in ("train", "test")
    }
    stock = f"mgsm/{kind}/mgsm_{kind}_{code}.yaml"
    theirs = stock_prompts(tmp_path / "stock", stock, shots, dataset_kwargs={"data_files": files})
    ours = our_prompts(tmp_path / "ours", KINDS[kind], shots, code, real_data)
    assert len(ours) == 250 and ours == theirs
    assert ours[0].count("\n\n") == shots


@needs_real_data
@pytest.mark.parametrize(
    ("task", "code", "shots"),
    [("mgsm", "en", 8), ("mgsm_en_cot", "en", 2), ("mgsm_direct", "en", 2)],
)
def test_a_language_that_the_harness_has_not_is_asked_as_one_that_it_has(
    tmp_path: Path, real_data: Path, task: str, code: str, shots: int
) -> None:
    """MGSM's English rows under the code of Yoruba."""
    (kind,) = [name for name, ours in KINDS.items() if ours == task]
    files = {
        split: str(real_data / "mgsm" / code / f"{split}.jsonl") for split in ("train", "test")
    }
    changes = {"dataset_kwargs": {"data_files": files}}
    stock = f"mgsm/{kind}/mgsm_{kind}_{code}.yaml"
    theirs = stock_prompts(tmp_path / "stock", stock, shots, list(range(20)), **changes)
    shutil.copytree(real_data / "mgsm" / code, tmp_path / "whole/mgsm/yo")
    assert our_prompts(tmp_path / "ours", task, shots, "yo", tmp_path / "whole", limit=20) == theirs


def test_word_problems_without_exemplars(tmp_path: Path) -> None:
    """No train.jsonl, for a language that the harness has and one that it lacks."""
    for code in ("sw", "yo"):
        write_rows(
            tmp_path / f"data/mgsm/{code}/test.jsonl",
            [{"question": f"{n} + 1?", "answer": None, "answer_number": n + 1} for n in (1, 2)],
        )
    assert our_prompts(tmp_path / "yo", "mgsm", 0, "yo", tmp_path / "data") == [
        f"Question: {n} + 1?\nStep-by-Step Answer:" for n in (1, 2)
    ]
    assert our_prompts(tmp_path / "sw", "mgsm", 0, "sw", tmp_path / "data") == [
        f"Swali: {n} + 1?\nJibu la Hatua kwa Hatua:" for n in (1, 2)
    ]
    with pytest.raises(PipelineError, match="has no mgsm/yo/train.jsonl. Put it there"):
        our_prompts(tmp_path / "two", "mgsm", 2, "yo", tmp_path / "data")
    shots = [
        worked(f"Question: {n} + 2?", f"Step-by-Step Answer: The sum. The answer is {n + 2}.", n)
        for n in (3, 4)
    ]
    write_rows(tmp_path / "data/mgsm/yo/train.jsonl", shots)
    shown = "".join(
        f"Question: {n} + 2?\nStep-by-Step Answer: The sum. The answer is {n + 2}.\n\n"
        for n in (3, 4)
    )
    assert our_prompts(tmp_path / "with", "mgsm", 2, "yo", tmp_path / "data") == [
        f"{shown}Question: {n} + 1?\nStep-by-Step Answer:" for n in (1, 2)
    ]


@pytest.mark.parametrize(
    ("task", "shots", "message"),
    [
        ("mgsm", 9, "num_fewshot=9, but there are 8 exemplars. Set num_fewshot to at most 8"),
        ("belebele", 9, "belebele_qac_9shot has no questions besides its 9 exemplars"),
        ("global_mmlu", 4, "num_fewshot=4, but there are 3 exemplars of "),
        ("flores", 7, "num_fewshot=7, but there are 6 exemplars"),
    ],
)
def test_too_few_exemplars_are_refused(
    data_root: Path, tmp_path: Path, task: str, shots: int, message: str
) -> None:
    definitions = task_specs(choice(asked(task, shots)), ["qac"], data_root, tmp_path / "tasks")
    with pytest.raises(PipelineError, match=message):
        load_tasks(definitions, Lock())


def test_the_hub_gives_the_same_prompts(
    tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the Hub hands out the made-up benchmarks under their published names."""
    tasks = {"mgsm": 2, "belebele": 2, "global_mmlu": 1, "flores": 1}
    for folder in data_root.iterdir():
        (folder / "qac").rename(folder / "sw")
    shots = [
        worked(f"Swali: {i}?", f"Jibu la Hatua kwa Hatua: Basi. Jibu ni {i}.", i) for i in range(8)
    ]
    write_rows(data_root / "mgsm/sw/train.jsonl", shots)
    local = {
        task: our_prompts(tmp_path / f"local {task}", task, shots, "sw", data_root)
        for task, shots in tasks.items()
    }
    asked_for = []

    def load_dataset(path: str, name: str, split: str | None = None, **_: Any) -> Any:
        asked_for.append((path, name))
        task = {
            "juletxara/mgsm": "mgsm",
            "facebook/belebele": "belebele",
            "openlanguagedata/flores_plus": "flores",
        }
        folder = (
            data_root
            / task.get(path, "global_mmlu")
            / {"swh_Latn": "sw", "eng_Latn": "en"}.get(name, name)
        )
        found = {}
        for file in folder.glob("*.jsonl"):
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            rows = [
                {**row, "text": row.pop("sentence")} if "sentence" in row else row for row in rows
            ]
            found[file.stem] = datasets.Dataset.from_list(rows)
        return found[split] if split else datasets.DatasetDict(found)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(reach, "refusal_of_set", lambda repository: None)
    for task, shots in tasks.items():
        assert our_prompts(tmp_path / f"hub {task}", task, shots, "sw", None) == local[task], task
    names = {
        ("juletxara/mgsm", "sw"),
        ("facebook/belebele", "swh_Latn"),
        ("openlanguagedata/flores_plus", "swh_Latn"),
    }
    assert names <= set(asked_for)
    with pytest.raises(
        PipelineError, match="mgsm_sw_9shot: num_fewshot=9, but there are 8 exemplars"
    ):
        our_prompts(tmp_path / "more", "mgsm", 9, "sw", None)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: (_ for _ in ()).throw(OSError("gated"))
    )
    with pytest.raises(
        PipelineError, match=r"flores_en-sw_0shot cannot be read \(gated\). Run stage=prefetch"
    ):
        our_prompts(tmp_path / "gated", "flores", 0, "sw", None)


@needs_real_data
@pytest.mark.parametrize("code", ["ja", "de", "fr", "zh", "ru", "es", "th"])
def test_every_other_language_of_mgsm_is_read(tmp_path: Path, real_data: Path, code: str) -> None:
    assert len(our_prompts(tmp_path, "mgsm", 8, code, real_data, limit=2)) == 2


def test_constructed_languages_have_the_english_words_around_them(
    tmp_path: Path, data_root: Path
) -> None:
    prompt = our_prompts(tmp_path / "tasks", "mgsm", 1, "qac", data_root, limit=1)[0]
    shot = "Question: 1?\nStep-by-Step Answer: So. The answer is 1.\n\n"
    assert prompt == shot + "Question: test problem 0 in qac\nStep-by-Step Answer:"


@pytest.mark.parametrize("shots", [0, 3])
def test_belebele_is_the_stock_task_without_its_exemplars(
    tmp_path: Path, data_root: Path, shots: int
) -> None:
    files = {"test": str(data_root / "belebele/en/test.jsonl")}
    stock = "belebele/belebele_eng_Latn.yaml"
    theirs = stock_prompts(
        tmp_path / "stock",
        stock,
        shots,
        list(range(shots, 9)),
        dataset_kwargs={"data_files": files},
    )
    ours = our_prompts(tmp_path / "ours", "belebele", shots, "qac", data_root)
    assert len(ours) == 4 * (9 - shots) and ours == theirs
    assert all(
        prompt.startswith("P: Passage 0.\nQ: Which 0?\nA: option 0.1") for prompt in ours[:4]
    )


def test_options_by_their_text(tmp_path: Path, data_root: Path) -> None:
    """No letter is shown.

    Each option's text is weighed after the question, and the right one's row is right.
    """
    asked_for = {
        "belebele": "P: Passage {0}.\nQ: Which {0}?\nAnswer:",
        "global_mmlu": "What {0}?\nAnswer:",
    }
    for task, prompt in asked_for.items():
        weighed: list[tuple[str, str]] = []
        rows = [
            json.loads(line)
            for line in (data_root / f"{task}/qac/test.jsonl").read_text().splitlines()
        ]

        def weigh(context: str, text: str, weighed: list[tuple[str, str]] = weighed) -> float:
            weighed.append((context, text))
            return -1.0 if text.strip() in ("option 2.3", "b101") else -2.0

        definitions = task_specs(
            choice(asked(task, 0), options="text"), ["qac"], data_root, tmp_path / task
        )
        tasks, lm = load_tasks(definitions, Lock()), Scripted(weigh=weigh)
        found = score_tasks(lm, definitions, tasks, choice(), none_stored(tmp_path))
        if task == "belebele":
            texts = [[f" {row[f'mc_answer{i}']}" for i in range(1, 5)] for row in rows]
            numbers, right = (
                range(9),
                {0, 2, 4, 8},
            )  # 2 by its text; where all are alike the first is taken: 0, 4, 8
        else:
            texts = [[f" {row[f'option_{letter}']}" for letter in "abcd"] for row in rows]
            numbers, right = range(100, 108), {0, 1, 4}
        assert weighed == [
            (prompt.format(n), text) for n, of in zip(numbers, texts, strict=True) for text in of
        ]
        samples = found.samples[definitions[0].name]
        assert {sample["doc_id"] for sample in samples if sample["correct"]} == right


@pytest.mark.parametrize("shots", [0, 2])
def test_global_mmlu_is_the_stock_task_of_the_subject(
    tmp_path: Path, data_root: Path, shots: int
) -> None:
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
    assert (
        prompts[0]
        == "English: en dev says the word number 0 here.\nQac: qac dev says the word number 0"
        " here.\n\nEnglish: en devtest says the word number 0 here.\nQac:"
    )
    # The rows of the two files are in different orders: the id joins them.
    assert prompts[6].endswith("Qac: qac devtest says the word number 5 here.\nEnglish:")
