"""How long a run is expected to take, by its work."""

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Patch
from tiny_words import FEW, TINY, WORLD
from tokenizers import Tokenizer

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.estimate import cpu
from pipeline.estimate.durations import (
    BASE_ALONE,
    FILES,
    ON_GPU,
    STEP,
    gpu_here,
    guess,
    memory_here,
    total_seconds,
)
from pipeline.estimate.flops import Gpu, cards, training_seconds
from pipeline.estimate.gpu_budget import longest_row
from pipeline.estimate.models import shape_for
from pipeline.estimate.questions import THINKING, count_questions, question_sets_of, questions_of
from pipeline.estimate.training_rows import expected_size, expected_steps, row_lengths, row_tokens
from pipeline.models.checkpoint import read_json
from pipeline.models.shape import SHAPES, shape_of
from pipeline.runs.run import Run
from pipeline.stages.lengths import sampled_lengths
from pipeline.stages.rows import build
from pipeline.stages.steps import training_rows, training_steps
from pipeline.train.memory import LIBRARIES, full_model


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: Patch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def of(*words: str) -> Run:
    return build(compose([*words, "tracking.mode=disabled"]))  # type: ignore[arg-type]


@pytest.fixture
def training(world: Path, base: Path, runs_dir: Path) -> Callable[..., Run]:
    start = [
        "stage=sft",
        "expert=math",
        "model=trained",
        f"model.path={base}",
        f"data_root={world}",
        "threads=1",
    ]
    return lambda *words: of(*start, *FEW, f"runs_dir={runs_dir}", *words)


def seconds(run: Run, gpu: Callable[[], Gpu | None] = gpu_here) -> float:
    found = guess(run, gpu)
    assert found is not None
    return found


# --- first guesses ---


def test_by_tokens_and_steps(
    training: Callable[..., Run], math_expert: Path, base: Path, monkeypatch: Patch
) -> None:
    """By hand with the formula of estimate/flops.py, with rows as long as the longest of four."""
    shape = shape_of(read_json(base / "config.json"))
    run = training("sft.steps=50")
    rows = (run.parents["data"].folder / "train.jsonl").read_text().splitlines()[:64]
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    lengths = [len(tokenizer.encode("\n".join(json.loads(row).values())).ids) for row in rows]
    draws = random.Random(0)
    padded = statistics.fmean(max(draws.choices(lengths, k=4)) for _ in range(20_000))
    by_hand = training_seconds(
        shape, full_model(shape), 50 * 4, padded, run.config.sft, cpu.cpu(shape, 1)
    )
    fixed = 1 + FILES[False] * 4 * shape.parameters
    assert guess(run) == pytest.approx(fixed + by_hand + 50 * STEP, rel=0.03)
    more = seconds(training("sft.steps=100")) - seconds(training("sft.steps=50"))
    assert more == pytest.approx(seconds(run) - fixed)  # twice the steps, twice the time
    two = replace(run, config=replace(run.config, threads=2))
    assert fixed + 50 * STEP < seconds(two) < seconds(run)
    adapter = training("sft=lora", "sft.steps=50")
    before = seconds(adapter)
    monkeypatch.setitem(FILES, False, 1.0)  # a second a byte: of its base, which is read alone
    assert seconds(adapter) - before == pytest.approx(BASE_ALONE * 4 * shape.parameters, rel=1e-6)


def test_an_evaluation_by_its_questions(
    world: Path, base: Path, runs_dir: Path, tmp_path: Path
) -> None:
    start = [
        "stage=eval",
        f"checkpoint={base}",
        "eval=mgsm_2shot",
        "threads=1",
        f"runs_dir={runs_dir}",
    ]
    run: Any = of(*start, f"data_root={world}", "languages=[qac]")
    assert count_questions(run, run.config.eval.tasks[0], "qac") == 4  # as the world holds
    limited: Any = of(*start, f"data_root={world}", "languages=[qac]", "eval.limit=2")
    assert count_questions(limited, limited.config.eval.tasks[0], "qac") == 2
    hub: Any = of(*start, "languages=[sw]")
    assert count_questions(hub, hub.config.eval.tasks[0], "sw") == 250
    few: Any = of(*start, "languages=[sw]", "eval.limit=10")
    assert [kind.questions for run in (hub, few) for kind in question_sets_of(run)] == [
        250,
        10,
    ]  # of GPU-hours too
    assert seconds(limited) < seconds(run) < seconds(hub) / 3
    short: Any = of(*start, f"data_root={world}", "languages=[qac]", "eval.max_gen_toks=4")
    assert seconds(short) < seconds(run)
    assert (
        guess(of(*start, f"data_root={world}", "languages=[en,qac]")) == 0.2
    )  # averages of two runs


def test_questions_of_a_world_that_is_still_to_be_made(
    world: Path, base: Path, tmp_path: Path
) -> None:
    words = [
        f"checkpoint={base}",
        "eval=mgsm_0shot",
        "languages=[qac]",
        f"runs_dir={tmp_path}",
        f"data_root={world}",
    ]
    run: Any = of("stage=eval", *words)
    to_come = of("stage=data", *WORLD, f"runs_dir={tmp_path}")
    run = replace(run, parents={**run.parents, "data_root": to_come})
    assert count_questions(run, run.config.eval.tasks[0], "qac") == 4


def test_a_model_from_nothing_and_one_that_is_not_here(world: Path, tmp_path: Path) -> None:
    data = ["expert=sandbox_text", f"data_root={world}", "recipe=sandbox_math", "sft.packing=false"]
    data += [f"runs_dir={tmp_path}", "threads=1"]
    few, many = (of("stage=cpt", *TINY, *data, *FEW, f"sft.steps={steps}") for steps in (10, 1000))
    assert seconds(few) < seconds(many) / 20
    hub = of(
        "stage=sft",
        "expert=math",
        "model=llama3.1_8b",
        f"runs_dir={tmp_path}",
        "sft.steps=100",
        "threads=1",
    )
    shape: Any = SHAPES["llama3.1_8b"]
    flops_alone = (
        6 * (shape.parameters - shape.embedding) * 100 * hub.config.sft.batch_size * 320
    )  # Kaplan et al.
    assert seconds(hub) > flops_alone / cpu.cpu(shape, 1).bf16
    assert seconds(hub, lambda: cards()[ON_GPU]) < seconds(hub) / 100


def test_packed_rows_are_full(world: Path, base: Path, tmp_path: Path) -> None:
    """Steps count the documents' tokens.

    A row has the tokens of sft.seq_length, and takes its memory.
    """
    words = [
        "stage=cpt",
        "expert=sandbox_text",
        "model=trained",
        f"model.path={base}",
        f"data_root={world}",
    ]
    packed, plain = (
        of(*words, f"runs_dir={tmp_path}", f"sft.packing={value}") for value in ("true", "false")
    )
    length, batch = packed.config.sft.seq_length, packed.config.sft.batch_size
    documents = (training_rows(packed.parents["data"], expected=True) or 0) * statistics.fmean(
        row_lengths(packed)
    )
    assert expected_steps(packed) == pytest.approx(documents / length / batch, abs=1)
    assert (
        row_tokens(packed) == longest_row(packed) == length > longest_row(plain) > row_tokens(plain)
    )
    given = of(*words, f"runs_dir={tmp_path}", "sft.steps=7")
    assert expected_size(given) == (7 * batch, 7, 7 * batch * length)


def test_what_cannot_be_estimated_is_no_number(tmp_path: Path, base: Path) -> None:
    """A set on the Hub of which no size is asked, and a model whose shape is not known.

    They are counted, and not in the sum.
    """
    unsized = of(
        "stage=sft", "expert=math", "model=trained", f"model.path={base}", f"runs_dir={tmp_path}"
    )
    unknown = of(
        "stage=eval",
        "checkpoint=hub:who/ever",
        "eval=mgsm_2shot",
        "languages=[en]",
        f"runs_dir={tmp_path}",
    )
    known = of("stage=data", *WORLD, f"runs_dir={tmp_path}")
    assert total_seconds([unsized, unknown]) == (0, 2)
    assert total_seconds([known, unknown]) == (1, 1)
    assert total_seconds([known, known]) == (2, 0)


def test_an_unknown_model_has_a_remedy(tmp_path: Path) -> None:
    unknown = of("stage=sft", "expert=math", "model=hub:who/ever", f"runs_dir={tmp_path}")
    assert expected_size(unknown)[2] is None
    with pytest.raises(
        PipelineError,
        match="size of the model of math-full-s0 is unknown.*Run stage=prefetch first",
    ):
        shape_for(unknown)


def test_rows_of_a_local_file_are_counted(tmp_path: Path, base: Path) -> None:
    """gsm8k says no size: its file has 100 rows, of which 10 are for validation; 22 steps of 4."""
    (tmp_path / "gsm8k").mkdir()
    rows = [
        {"question": f"Mia has {n} cups.", "answer": f"{n} + 0 = <<{n}+0={n}>>{n}\n#### {n}"}
        for n in range(100)
    ]
    (tmp_path / "gsm8k/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "stage=sft",
        "expert=gsm8k",
        "model=trained",
        f"model.path={base}",
        f"data_root={tmp_path}",
        "threads=1",
    ]
    run = of(*words, "sft.batch_size=4", "data.validation=10", f"runs_dir={tmp_path}/runs")
    assert training_rows(run.parents["data"], expected=True) == 90
    assert training_steps(run, expected=True) == 22 and training_steps(run) is None
    assert seconds(run) > 0 and (memory_here(run) or 0) > LIBRARIES
    small = [*words, "data.validation=10", "sft.micro_batch_size=1"]
    one, two = (memory_here(of(*small, f"sft.processes={count}")) for count in (1, 2))
    assert one and two == 2 * one
    sized = of(*words, "sft.batch_size=4", "data.size=40", f"runs_dir={tmp_path}/runs")
    assert training_steps(sized, expected=True) == training_steps(sized) == 10
    fewer = of(
        *words,
        "sft.batch_size=4",
        "data.size=400",
        "data.allow_fewer=true",
        f"runs_dir={tmp_path}/runs",
    )
    assert training_steps(fewer, expected=True) == 25


def test_an_own_task_that_is_sampled_is_planned_by_its_rows(base: Path, tmp_path: Path) -> None:
    """Thirty questions, sixteen answers each; thoughts are as long as they may be."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 30)
    (own / "own_aime.yaml").write_text(
        "task: own_aime\ndataset_path: json\ntest_split: test\noutput_type:"
        " generate_until\ndoc_to_text: question\ndoc_to_target: answer\ndataset_kwargs:"
        f" {{data_files: {{test: {own}/rows.jsonl}}}}\n"
    )
    words = [
        "stage=eval",
        f"checkpoint={base}",
        "eval=own_aime",
        f"eval.include_path={own}",
        "languages=[en]",
    ]
    words += ["eval.temperature=0.6", "eval.answers=16", "eval.max_gen_toks=32768"]

    def planned(*more: str) -> Any:
        run: Any = of(*words, *more)
        return questions_of(run, run.config.eval.tasks[0], "en")

    plain, thinking = planned(), planned("eval.think_end=END")
    assert (
        plain.questions == thinking.questions == 16 * 30
        and planned("eval.limit=10").questions == 16 * 10
    )
    assert thinking.answer / THINKING == thinking.room == 32768 > plain.answer / THINKING


def test_the_rows_of_a_joint_set_are_known_when_those_of_both_its_sets_are(
    world: Path, tmp_path: Path
) -> None:
    words = [
        "stage=data",
        "expert=math_qac",
        f"data_root={world}",
        f"runs_dir={tmp_path}",
        "data.size=8",
    ]
    assert training_rows(of(*words)) == 16  # type: ignore[arg-type]
    assert training_rows(of(*words, "data.allow_fewer=true")) is None  # type: ignore[arg-type]


def test_the_tokens_of_conversations_are_those_of_all_their_turns(
    base: Path, tmp_path: Path
) -> None:
    """Beside what a template as ChatML's writes, with roles as special tokens."""
    turns = [
        {"role": role, "content": "a farmer has 7 eggs and buys 12 more"}
        for role in ("user", "assistant") * 3
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    per_turn = (
        len(tokenizer.encode("a farmer has 7 eggs and buys 12 more").ids) + 5
    )  # begin, role, \n, end, \n
    (tokens,) = sampled_lengths(tmp_path / "rows.jsonl", base / "tokenizer.json")
    assert tokens == pytest.approx(6 * per_turn, rel=0.25)
