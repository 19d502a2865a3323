"""SmolLM2 in float32 on real MGSM.

The same prompts, answers and scores as the evaluation harness's command line.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from by_lm_eval import STOCK, answered_by_lm_eval, assert_same_answers, local_files, stock_mgsm
from fixture_types import Call, Make
from mergekit_digests import SWAP
from mgsm_steps_tokens import check_tokens, with_items
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config.evaluation import Eval, EvalTask
from pipeline.estimate.flops import question_set
from pipeline.evaluate.prompts import load_tasks
from pipeline.evaluate.tasks import task_specs
from pipeline.hub.lock import Lock

pytestmark = [pytest.mark.real_models, pytest.mark.real_data]

QUESTIONS, LENGTH = 2, 16  # of each task; max_gen_toks
MGSM, CHOICES = "{task: mgsm, num_fewshot: 2}", "{task: global_mmlu, num_fewshot: 5}"


@pytest.fixture(scope="module")
def data_root(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return real MGSM, and calculations from GSM8K's solutions as multiple choice.

    The calculations are in Global MMLU's columns. The gold result is among three other numbers, at
    each letter in turn.
    """
    root = tmp_path_factory.mktemp("data")
    (root / "mgsm").symlink_to(data / "mgsm")
    for source, split in (("train", "dev"), ("test", "test")):
        solutions = (data / f"gsm8k/{source}.jsonl").read_text(encoding="utf-8")
        rows = []
        for number, (calculation, result) in enumerate(
            re.findall(r"<<([^=<>]+)=(\d+)>>", solutions)[:8]
        ):
            gold, at = int(result), number % 4
            options = [gold + 10, 2 * gold + 1, gold + 1]
            options.insert(at, gold)
            rows.append(
                {
                    f"option_{letter}": str(value)
                    for letter, value in zip("abcd", options, strict=True)
                }
                | {
                    "question": f"{calculation} = ?",
                    "answer": "ABCD"[at],
                    "sample_id": f"gsm8k/{source}/{number}",
                }
                | {"subject": "elementary_mathematics", "subject_category": "STEM"}
            )
        file = root / f"global_mmlu/en/{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return root


@pytest.fixture
def evaluate(call: Call, data_root: Path, tmp_path: Path) -> Make:
    """Return the folder of an evaluation with its own runs_dir, so that no score is cached."""

    def evaluated(checkpoint: Path, tasks: str, *overrides: str) -> Path:
        runs = tmp_path / f"runs{len(list(tmp_path.glob('runs*')))}"
        shared = [
            f"eval.tasks=[{tasks}]",
            f"data_root={data_root}",
            f"runs_dir={runs}",
            "tracking.mode=disabled",
        ]
        shared += [
            "languages=[en]",
            "eval.dtype=float32",
            f"eval.limit={QUESTIONS}",
            f"eval.max_gen_toks={LENGTH}",
        ]
        told = call(
            "stage=eval", "eval=mgsm_2shot", f"checkpoint={checkpoint}", *shared, *overrides
        )
        assert told.status == 0, told.err
        return Path(told.out.strip())

    return evaluated


@pytest.fixture
def swap(call: Call, smollm2: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a swap of layers with a copy whose layers are scaled, deleted after the test."""
    other = tmp_path / "other"
    shutil.copytree(smollm2, other, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(smollm2 / "model.safetensors")
    scaled = {
        name: tensor * (1.0625 if ".layers." in name else 1) for name, tensor in tensors.items()
    }
    save_file(scaled, other / "model.safetensors", {"format": "pt"})
    words = SWAP.format(math=other, language=smollm2).split()
    told = call("stage=merge", "merge=layer_swap", *words, f"runs_dir={tmp_path}/merged")
    assert told.status == 0, told.err
    yield Path(told.out.strip())
    for folder in (other, tmp_path / "merged"):
        shutil.rmtree(folder)


def samples_of(folder: Path, task: str) -> list[dict[str, Any]]:
    """Return the samples of all languages."""
    texts = [
        path.read_text(encoding="utf-8") for path in sorted(folder.glob(f"samples/{task}.*.jsonl"))
    ]
    return [json.loads(line) for text in texts for line in text.split("\n") if line]


def stock_choices(root: Path) -> tuple[str, dict[str, Any]]:
    """Write the harness's task file of a subject of Global MMLU with five exemplars."""
    file = STOCK / "global_mmlu/full/en/global_mmlu_full_en_elementary_mathematics.yaml"
    files = local_files(root / "global_mmlu/en", dev="dev", test="test")
    return "global_mmlu_en_5shot", {"include": str(file), "num_fewshot": 5, **files}


def compare(
    ours: Path, model: Path, tasks: list[tuple[str, dict[str, Any]]], folder: Path, *options: str
) -> None:
    """Check that the answers to all questions equal those of the command line."""
    rows = {name: list(range(QUESTIONS)) for name, _ in tasks}
    stock, samples = answered_by_lm_eval(model, tasks, rows, folder, *options, batch_size=QUESTIONS)
    report = json.loads((ours / "scores.json").read_text())
    assert assert_same_answers(report, ours, stock, samples) == QUESTIONS * len(tasks)
    for sample in samples_of(ours, "mgsm"):
        assert (
            sum(sample["prompt"].count(f"{word}: ") for word in ("Question", "Swali")) == 3
        )  # two exemplars


def test_scores_of_an_export_equal_lm_evals(
    evaluate: Make, swap: Path, call: Call, data_root: Path, tmp_path: Path
) -> None:
    """A swap is scored by stage=eval, with shared prefixes and batches of 2.

    Its export by lm_eval, each prompt whole. Equal are prompts, answers character by character,
    extracted numbers, choices, scores; log-likelihoods to 1e-4.
    """
    exported = tmp_path / "exported"
    told = call("stage=export", f"checkpoint={swap}", f"export.to={exported}")
    assert told.status == 0, told.err
    model, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert (
        not info["missing_keys"] and not info["unexpected_keys"] and model.dtype == torch.bfloat16
    )
    weights = load_file(swap / "model.safetensors")
    assert all(
        torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters()
    )
    del model
    ours = evaluate(swap, f"{MGSM},{CHOICES}", "eval.batch_size=2")
    tasks = [stock_mgsm(data_root, "en", LENGTH), stock_choices(data_root)]
    compare(ours, exported, tasks, tmp_path / "stock")
    shutil.rmtree(exported)


def test_scores_through_a_chat_template_equal_lm_evals(
    evaluate: Make, smollm2: Path, data_root: Path, tmp_path: Path
) -> None:
    """Of the instruction-tuned model itself, stored in bfloat16 and scored in float32."""
    ours = evaluate(smollm2, MGSM, "eval.chat_template=true", "eval.batch_size=2", "languages=[sw]")
    options = ["--apply_chat_template", "--fewshot_as_multiturn", "True"]
    compare(ours, smollm2, [stock_mgsm(data_root, "sw", LENGTH)], tmp_path / "stock", *options)
    assert all(
        sample["prompt"].count("<|im_start|>assistant") == 3 for sample in samples_of(ours, "mgsm")
    )


def test_shared_prefixes_and_batch_sizes_change_no_answer(evaluate: Make, smollm2: Path) -> None:
    """In float32: four prompts at a time behind a shared prefix, or each alone and whole."""
    answers, likelihoods = [], []
    for share, batch in (("true", 4), ("false", 1)):
        how = [
            f"eval.share_prefix={share}",
            f"eval.batch_size={batch}",
            "eval.limit=2",
            "eval.max_gen_toks=8",
        ]
        folder = evaluate(smollm2, f"{MGSM.replace('2', '1')},{CHOICES.replace('5', '2')}", *how)
        answers.append([sample["response"] for sample in samples_of(folder, "mgsm")])
        chosen = samples_of(folder, "global_mmlu")
        likelihoods.append(
            [value for sample in chosen for value in sample["loglikelihoods"].values()]
        )
    assert (
        len(set(answers[0])) == 2 and len(set(likelihoods[0])) == 8
    )  # there is something to agree on
    assert answers[1] == answers[0] and likelihoods[1] == pytest.approx(likelihoods[0], abs=1e-4)


@pytest.mark.parametrize(("code", "tolerance"), [("en", 0.05), ("sw", 0.1)])
def test_the_plan_of_mgsm_steps_counts_the_tokens_that_are_computed(
    smollm2: Path, data: Path, tmp_path: Path, code: str, tolerance: float
) -> None:
    """All 634 steps: the distinct beginnings of the prompts, by a trie of dictionaries."""
    root = with_items(data, tmp_path / "data", code)
    definitions = task_specs(Eval("", [EvalTask("mgsm_steps", 4)]), [code], root, tmp_path)
    (task,) = load_tasks(definitions, Lock())
    task.build_all_requests()
    texts = [
        context + continuation
        for context, continuation in (request.args for request in task.instances)
    ]
    trie: dict[int, Any] = {}
    tokens = 0
    for ids in AutoTokenizer.from_pretrained(smollm2)(texts).input_ids:
        node = trie
        for token in ids[:-1]:
            tokens += token not in node
            node = node.setdefault(token, {})
    plan = question_set("mgsm_steps", 4, code)
    assert tokens == pytest.approx(plan.prefix + plan.questions * plan.question, rel=tolerance)


def test_calculations_of_mgsm_steps_are_whole_tokens(
    smollm2: Path, data: Path, tmp_path: Path
) -> None:
    for code in ("en", "te"):
        check_tokens(data, tmp_path / code, code, lambda _: AutoTokenizer.from_pretrained(smollm2))
