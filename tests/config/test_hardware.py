"""hardware=: its values reach trainings, jobs and plans, and each table fits each machine."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixture_types import Call, Patch

from pipeline.commands.plan import show_plan
from pipeline.config import conf
from pipeline.config.compose import compose, stage_of
from pipeline.errors import PipelineError
from pipeline.estimate.flops import cards
from pipeline.files import ADDED_CONF
from pipeline.stages.rows import build
from pipeline.tables.planned_runs import Planning

PAPER_TABLES = [  # but for those that add no run to the table that they start from
    file.stem
    for file in sorted((conf.folder() / conf.TABLES).glob("*.yaml"))
    if file.stem.startswith(("layer_swapping", "unreasonable"))
    and "runs" in yaml.safe_load(file.read_text("utf-8"))
]


def sft_of(*words: str) -> Any:
    stage: Any = compose(["stage=sft", *words])
    return stage.sft


def read(name: str) -> Any:
    return yaml.safe_load((conf.folder() / f"hardware/{name}.yaml").read_text())


# --- what is set ---


@pytest.fixture(autouse=True)
def large_disk(monkeypatch: Patch) -> None:
    monkeypatch.setattr("pipeline.commands.plan.free_bytes", lambda folder: 10**14)


def test_a_training_has_what_the_file_says_and_what_is_typed_wins() -> None:
    for name in conf.options("hardware"):
        found = sft_of("expert=math", f"hardware={name}")
        assert {key: getattr(found, key) for key in read(name)["sft"]} == read(name)["sft"]
    typed = sft_of("expert=math", "hardware=a100_80x8", "sft.processes=2", "sft.parallel=ddp")
    assert (typed.processes, typed.parallel, typed.gradient_checkpointing) == (2, "ddp", True)


def test_adapters_keep_fp32_weights_and_moments() -> None:
    for method in ("lora", "simultaneous_lora"):
        words = (
            ["expert=math_sw", "partition=B"] if method == "simultaneous_lora" else ["expert=sw"]
        )
        found = sft_of(*words, f"sft={method}", "hardware=a100_80x1")
        assert (found.weights, found.optimizer, found.micro_batch_size) == ("float32", "adamw", 4)
    assert sft_of("expert=sw", "sft.adapter=lora", "hardware=a100_80x1").optimizer == "adamw"


def test_the_command_line_and_a_table_give_one_run() -> None:
    words = {"stage": "sft", "expert": "sw", "hardware": "h100_80x8", "recipe": "unreasonable_full"}
    table: Any = stage_of(words)
    line: Any = compose([f"{key}={value}" for key, value in words.items()])
    assert build(table).hash == build(line).hash
    typed = ["sft.processes=2", "sft.parallel=fsdp2", "sft.gradient_checkpointing=true"]
    by_hand: Any = compose(["stage=sft", "expert=sw", "recipe=unreasonable_full", *typed])
    assert build(line).hash == build(by_hand).hash


def test_jobs_and_plans_have_their_part() -> None:
    plan: Any = compose(["stage=plan", "table=unreasonable_table3", "hardware=a100_80x8"])
    assert (plan.plan.gpu, plan.plan.gpus, plan.every) == ("a100_80", 8, {"hardware": "a100_80x8"})
    assert plan.launcher.memory_per_gpu is None  # which Slurm alone reads
    table: Any = compose(
        ["stage=table", "table=unreasonable_table3", "hardware=a100_80x8", "launcher=slurm"]
    )
    assert (table.launcher.memory_per_gpu, table.launcher.gpu) == ("48G", "a100_80")
    one: Any = compose(
        [
            "stage=sft",
            "expert=sw",
            "hardware=a100_80x8",
            "launcher=slurm",
            "launcher.memory_per_gpu=1T",
        ]
    )
    assert one.launcher.memory_per_gpu == "1T"
    command: Any = compose(["stage=plan", "expert=sw", "hardware=h100_80x1"])
    assert command.plan.gpu == "h100_80" and "hardware=h100_80x1" in command.command


def test_a_tables_own_hardware_is_that_of_its_plan_and_jobs(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    text = """
name: mine
every: {model: llama3.1_8b, eval.dtype: float32, hardware: a100_80x8}
runs: {math: {stage: sft, expert: math}}
score: {eval: mgsm_2shot, in: en}
columns: {math: {run: math}}
"""
    (tmp_path / "mine.yaml").write_text(text)
    words = [f"table={tmp_path}/mine.yaml", f"runs_dir={tmp_path}"]
    own = show_plan(compose(["stage=plan", *words]))  # type: ignore[arg-type]
    typed = show_plan(compose(["stage=plan", *words, "every.hardware=a100_80x8"]))  # type: ignore[arg-type]
    (tmp_path / "mine.yaml").write_text(text.replace(", hardware: a100_80x8", ""))
    flag = show_plan(compose(["stage=plan", *words, "hardware=a100_80x8"]))  # type: ignore[arg-type]
    totals = [text.splitlines()[1] for text in (own, typed, flag)]
    assert "GPU-hours on a100_80x8 = " in totals[0] and totals[0] == totals[1] == totals[2]
    (tmp_path / "mine.yaml").write_text(text)
    config: Any = compose(["stage=table", words[0], words[1], "launcher=slurm"])
    assert Planning.of(config).config.launcher.memory_per_gpu == "48G"
    other: Any = compose(["stage=plan", words[0], words[1], "plan.gpu=h100_80", "plan.gpus=16"])
    assert (Planning.of(other).config.plan.gpu, Planning.of(other).config.plan.gpus) == (
        "h100_80",
        16,
    )  # type: ignore[attr-defined]
    default: Any = compose(
        ["stage=plan", words[0], words[1], "plan.gpus=1"]
    )  # typed, as the default is
    assert Planning.of(default).config.plan.gpus == 1  # type: ignore[attr-defined]
    (tmp_path / "conf/launcher").mkdir(parents=True)
    (tmp_path / "conf/launcher/site.yaml").write_text("name: slurm\nmemory_per_gpu: 64G\n")
    monkeypatch.setenv(ADDED_CONF, str(tmp_path / "conf"))
    site: Any = compose(
        ["stage=table", *words, "launcher=site"]
    )  # whose options stand above a table's hardware
    assert Planning.of(site).config.launcher.memory_per_gpu == "64G"


# --- wrong input ---


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "sft: {learning_rate: 1.0e-3}",
            "mine.yaml sets sft.learning_rate, but hardware may only set sft.processes, ",
        ),
        ("eval: {batch_size: 4}", "mine.yaml sets eval.batch_size, but hardware may only set"),
        ("sft: 8", "mine.yaml sets sft, but hardware may only set"),
        ("", "mine.yaml sets no value. Write for example sft: {processes: 8}"),
        ("sft: {processes: 0}", "mine.yaml: sft.processes must be at least 1, got 0"),
        (
            "plan: {gpu: rtx4090}",
            "mine.yaml: plan.gpu must be one of a100_80, h100_80, h200_141, a100_40, gpu_24, ",
        ),
    ],
)
def test_a_file_of_ones_own(content: str, sentence: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware/mine.yaml").write_text(content)
    told = call(
        f"--config-dir={tmp_path}",
        "stage=sft",
        "expert=sw",
        "hardware=mine",
        f"runs_dir={tmp_path}/runs",
    )
    assert told.status == 1 and sentence in told.err and told.err.count("\n") == 1


def test_what_no_gpu_or_memory_here_holds_stops_before_fetching(
    call: Call, tmp_path: Path, monkeypatch: Patch
) -> None:
    """8B parameters with fp32 moments are 128 GB.

    More than a machine of 64 GB, or one GPU of 80.
    """
    from pipeline.estimate import cpu
    from pipeline.launch import preflight

    monkeypatch.setattr(cpu, "memory", lambda: 64 * 10**9)
    monkeypatch.setattr(preflight, "visible_gpus", list)
    told = call("stage=sft", "expert=math", f"runs_dir={tmp_path}/runs")
    first, error = told.err.splitlines()
    assert first == "math-full-s0: recipe=layer_swapping_math_1 mixture=layer_swapping"
    assert (
        told.status == 1
        and "GB of memory, and this machine has 64 and no GPU. Run it on a node with" in error
    )
    monkeypatch.setattr(preflight, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(preflight, "gpu_memory", lambda: 80 * 2**30)
    told = call("stage=sft", "expert=math", f"runs_dir={tmp_path}/runs")
    assert (
        told.status == 1
        and "on each GPU, and these have 86. Set hardware=" in told.err.splitlines()[1]
    )
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").glob("*/manifest.json"))


# --- the papers ---


LARGEST = ("layer_swapping_table1", "layer_swapping_table2", "layer_swapping_claims")


@pytest.mark.parametrize("name", [*PAPER_TABLES])
def test_each_table_of_the_papers_fits_each_machine(name: str, tmp_path: Path) -> None:
    """An H100 has an A100's memory, and their files differ only in name and processes."""
    for count, others in ((1, {}), (8, {"processes": 2})):
        a100, h100 = read(f"a100_80x{count}"), read(f"h100_80x{count}")
        assert h100 == {
            **a100,
            "sft": {**a100["sft"], **others},
            "plan": {**a100["plan"], "gpu": "h100_80"},
        }
    assert cards()["a100_80"].memory == cards()["h100_80"].memory
    for hardware in ("a100_80x8", "h100_80x8", *["a100_80x1"] * (name not in LARGEST)):
        words = [f"table={name}", f"hardware={hardware}", f"runs_dir={tmp_path}"]
        text = show_plan(compose(["stage=plan", *words]))  # type: ignore[arg-type]
        assert f" GPU-hours on {hardware} = " in text.splitlines()[1]


def test_the_first_papers_recipe_is_the_default_of_its_experts() -> None:
    """Table 4's, on its data, where nothing else is named.

    From two ends, and for each job of a sweep.
    """

    def hash_of(*words: str) -> str:
        return build(compose(["stage=sft", *words])).hash  # type: ignore[arg-type]

    for expert in ("math", "sw", "bn", "te", "ja"):
        named = hash_of(
            f"expert={expert}", f"recipe=layer_swapping_{expert}_1", "mixture=layer_swapping"
        )
        assert (
            hash_of(f"expert={expert}")
            == named
            == build(stage_of({"stage": "sft", "expert": expert})).hash
        )  # type: ignore[arg-type]
        assert hash_of(f"expert={expert}", "model=llama3.1_8b", "sft=full", "seed=0") == named
        assert hash_of(f"expert={expert}", "model=hub:meta-llama/Llama-3.1-8B") == named
    plain = hash_of("expert=math", "recipe=default", "mixture=all")
    assert (
        plain == hash_of("expert=math", "recipe=default") == hash_of("expert=math", "mixture=all")
    )
    others = (
        ["model=qwen2.5_7b_instruct"],
        ["sft=lora"],
        ["sft=partial", "partition=B"],
        ["sft.adapter=lora"],
    )
    for words in others:
        assert hash_of("expert=math", *words) == hash_of(
            "expert=math", *words, "recipe=default", "mixture=all"
        )
    assert hash_of("expert=sw_aya") == hash_of("expert=sw_aya", "recipe=default", "mixture=all")


@pytest.mark.parametrize(
    ("hardware", "sft", "fits"),
    [
        ("gpu_24", "lora", 23.5),
        ("gpu_48", "lora", 47),
        ("gpu_24", "full", None),
        ("a100_40x1", "full", None),
        ("a100_40x8", "full", 41),
        ("h200_141x1", "full", 149),
    ],
)
def test_smaller_cards_hold_what_the_plan_says_or_are_refused(
    hardware: str, sft: str, fits: float | None, tmp_path: Path
) -> None:
    recipe = {"lora": ["mixture=unreasonable", "recipe=unreasonable_lora"], "full": []}[sft]
    words = [
        "stage=plan",
        "expert=math",
        f"sft={sft}",
        "model=llama3.1_8b",
        f"hardware={hardware}",
        *recipe,
    ]
    config: Any = compose([*words, f"runs_dir={tmp_path}"])
    if fits is None:
        with pytest.raises(
            PipelineError, match=rf"GB a GPU, and {hardware[:6]}.*Set hardware=.*\(math-full-s0\).$"
        ):
            show_plan(config)
        return
    (needed,) = re.findall(r"^trainings .* (\d+)$", show_plan(config), re.MULTILINE)
    assert int(needed) <= fits


@pytest.mark.parametrize(("hardware", "products"), [("h100_80x8", "bf16x3"), ("gpu_24", "ieee")])
def test_the_plan_says_which_products_score_a_table(
    hardware: str, products: str, tmp_path: Path
) -> None:
    words = [
        "stage=plan",
        "table=layer_swapping_sw",
        f"hardware={hardware}",
        f"runs_dir={tmp_path}",
    ]
    config: Any = compose([*words, "plan.gpu=h200_141"])
    assert f"scored in float32 ({products} products) by hf" in re.sub(
        r"\s+", " ", show_plan(config)
    )
