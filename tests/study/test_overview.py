"""The text of stage=plan: what is decided, in lines of 120 columns."""

import re
from pathlib import Path

import pytest
from fixture_types import Call, Patch

from pipeline.commands.plan import show_plan
from pipeline.config.compose import compose
from pipeline.errors import PipelineError

OF_PAPERS = (
    "layer_swapping_table1",
    "layer_swapping_sw",
    "unreasonable_table3",
    "unreasonable_table_a3",
    "sandbox",
)


def planned(*words: str, free: float = 1e14) -> tuple[str, str]:
    """Return (the text of a plan, why it cannot be computed)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.commands.plan.free_bytes", lambda folder: free)
        try:
            return show_plan(compose(["stage=plan", *words])), ""  # type: ignore[arg-type]
        except PipelineError as error:
            return error.output, str(error)


@pytest.mark.parametrize("hardware", [(), ("hardware=a100_80x8",)])
@pytest.mark.parametrize("name", OF_PAPERS)
def test_a_plan_is_short_and_without_hashes_of_runs(
    name: str, hardware: tuple[str, ...], tmp_path: Path
) -> None:
    text, refused = planned(
        f"table={name}", f"runs_dir={tmp_path}", *(hardware if name != "sandbox" else ())
    )
    lines = text.splitlines()
    assert not refused and len(lines) <= 32 and max(map(len, lines[:-1])) <= 120
    assert not re.search(r"-[0-9a-f]{12}\b", text)
    assert lines[0].startswith(f"{name}: ") and lines[-1].startswith(
        "Next: python -m pipeline stage=table "
    )
    assert re.search(r"^[\d,]+ runs, 0 done\. ", text, re.MULTILINE)
    kinds = [line.split("  ")[0] for line in lines]
    assert {"trainings", "scores"} <= {*kinds}
    detectable = r"^points detectable at p < 0\.0\d+  +these trainings  3 seeds  5 seeds  8 seeds$"
    assert re.search(detectable, text, re.MULTILINE)


def test_the_rows_of_the_table_are_the_total(tmp_path: Path) -> None:
    """Hours and runs of the kinds come to the hours and runs of the second line.

    Selections are runs that take none.
    """
    text, _ = planned("table=layer_swapping_table1", f"runs_dir={tmp_path}", "hardware=a100_80x8")
    total = float(re.search(r"([\d.]+) GPU-hours on a100_80x8", text)[1])  # type: ignore[index]
    rows = re.findall(r"^([a-z ]+?)  +([\d,]+) +0 +(\d) .* ([\d.]+) +\d+$", text, re.MULTILINE)
    assert [row[0] for row in rows] == [
        "trainings",
        "choosing snapshots",
        "scores",
        "scores of merges",
    ]
    assert sum(float(row[3]) for row in rows) == pytest.approx(total, abs=0.3)
    assert {row[0]: row[2] for row in rows}["trainings"] == "4"  # GPUs of a training
    assert int(rows[0][1]) == 15


def test_a_disk_that_is_too_small_is_fixed_first_with_what_freeing_needs(tmp_path: Path) -> None:
    words = ("table=layer_swapping_table1", f"runs_dir={tmp_path}", "hardware=a100_80x8")
    text, refused = planned(*words, free=3e12)
    fix = next(line for line in text.splitlines() if line.startswith("FIX"))
    assert "Trainings write 4.34 TB to runs_dir=" in fix and "Next: fix it" in text
    assert text.splitlines()[-1].startswith(
        "Next: fix it, then run python -m pipeline stage=table "
    )
    remedy = "Set a runs_dir with more room, or free_snapshots=true, which needs 1.22 TB."
    assert refused.endswith(f"where 3.00 TB are free. {remedy}")
    _, refused = planned(*words, "free_snapshots=true", free=3e12)
    assert not refused
    _, refused = planned(*words, "free_snapshots=true", free=1e12)
    assert "free_snapshots" not in refused and "Trainings write 1.22 TB" in refused


def test_a_dry_run_refuses_what_the_plan_refuses(
    tmp_path: Path, monkeypatch: Patch, call: Call
) -> None:
    words = ["table=layer_swapping_table1", f"runs_dir={tmp_path}", "hardware=a100_80x8"]
    monkeypatch.setattr("pipeline.commands.plan.free_bytes", lambda folder: 3e12)
    planned, tried = (
        call("stage=plan", *words),
        call("stage=table", *words, "launcher=slurm", "launcher.dry_run=true"),
    )
    assert (
        planned.status == tried.status == 1
        and planned.err == tried.err
        and "Trainings write 4.34 TB" in tried.err
    )
    fix = [
        [line for line in told.out.splitlines() if line.startswith("FIX")]
        for told in (planned, tried)
    ]
    assert fix[0] == fix[1] != [] and not list(tmp_path.rglob("*.sh"))


def test_rows_that_are_not_known_are_hours_that_are_not_known(tmp_path: Path) -> None:
    text, _ = planned("expert=math", "sft=lora", "hardware=gpu_24", f"runs_dir={tmp_path}")
    total = " ".join(text.split("KNOW")[0].split())
    assert "Unknown GPU-hours, of 1 of 1 runs (The rows of " in total and "Set data.size" in total
    for size, hours in ((10_000, r"\d\.\d GPU-hours"), (100, r"\d+ s of a GPU")):  # never 0.0 hours
        text, _ = planned(
            "expert=math",
            "sft=lora",
            "hardware=gpu_24",
            f"data.size={size}",
            f"runs_dir={tmp_path}",
        )
        assert re.search(f" done\\. {hours} on gpu_24x1", text), text


@pytest.mark.parametrize(
    ("knobs", "outside"),
    [
        ([], "(embeddings, final norm, head averaged)"),
        (
            ["merge.embeddings=math", "merge.final_norm=math"],
            "(embeddings, final norm of the math expert, head ave",
        ),
    ],
)
def test_a_layer_swap_says_whose_the_weights_outside_the_layers_are(
    math_expert: Path, language_expert: Path, tmp_path: Path, knobs: list[str], outside: str
) -> None:
    experts = [
        f"merge.math={math_expert}",
        f"merge.language={language_expert}",
        "merge.scale_to_depth=true",
    ]
    text, _ = planned(
        "plan.stage=merge", "merge=layer_swap", *experts, *knobs, f"runs_dir={tmp_path}"
    )
    assert f" of the language expert {outside}" in " ".join(text.split()), text


def test_packed_rows_that_are_not_there_are_what_is_to_fix(world: Path, tmp_path: Path) -> None:
    """A data run's folder as data_root keeps its whole name; a run's name loses its hash."""
    words = (
        "plan.stage=cpt",
        "expert=math",
        "model=sandbox",
        f"data_root={world}",
        f"runs_dir={tmp_path}",
    )
    text, refused = planned(*words)
    told = (
        f"{world} has no open_web_math/train.jsonl. Put the file there, or leave data_root out to"
        " use the Hub."
    )
    assert refused.endswith(told) and world.name in text and "Next: fix it" in text


def test_claims_that_no_answers_could_decide_are_listed(tmp_path: Path) -> None:
    listed, _ = planned("table=unreasonable_table_a2", f"runs_dir={tmp_path}", "plan.lines=2")
    told = "cannot be tested: one training of each model does not show how much trainings differ"
    assert told in listed


def test_lines_come_when_they_are_asked_for(tmp_path: Path) -> None:
    words = ("table=sandbox", f"runs_dir={tmp_path}")
    plain, _ = planned(*words)
    listed, _ = planned(*words, "plan.lines=2")
    assert listed.startswith(plain) and "and 66 more; plan.lines=68 lists all" in listed


@pytest.mark.parametrize(
    ("trained", "scored", "said"),
    [
        (
            "chat",
            "false",
            "trained with sft.template=chat and scored without it. Set eval.chat_template=true",
        ),
        (
            "plain",
            "true",
            (
                "trained with sft.template=plain and scored with the chat template. Set"
                " eval.chat_template="
            ),
        ),
        ("chat", "true", ""),
    ],
)
def test_one_template_in_training_and_another_in_scoring(
    trained: str, scored: str, said: str, tmp_path: Path
) -> None:
    words = (
        f"every.sft.template={trained}",
        f"every.eval.chat_template={scored}",
        "every.model=llama3.1_8b_instruct",
    )
    text, _ = planned("table=layer_swapping_sw", f"runs_dir={tmp_path}", "plan.lines=1", *words)
    assert said in text and bool(said) is (" is trained with sft.template=" in text)


def test_a_command_has_the_same_screen(tmp_path: Path) -> None:
    text, _ = planned("expert=math", f"runs_dir={tmp_path}", "hardware=h100_80x1")
    lines = text.splitlines()
    assert (
        lines[0] == "stage=sft: math-full-s0 (recipe=layer_swapping_math_1 mixture=layer_swapping)"
    )
    assert (
        lines[-1]
        == f"Next: python -m pipeline stage=sft expert=math runs_dir={tmp_path} hardware=h100_80x1"
    )
    started = "trainings: full; 40,000 rows in 10,000 steps of 4, 12.8 million tokens, rate 2e-08"
    assert any(line.startswith(started) for line in lines)


def test_a_plan_counts_a_problem_once_and_asks_for_no_questions_that_do_not_exist(
    tmp_path: Path,
) -> None:
    """MGSM has 250 problems, also in three languages and of four models.

    By hand, the mean of twelve scores with a correlation of 0.5 has (1 + 11 / 2) / 12 of a single
    variance: 3.083 sqrt(0.2 * 0.542 / 250) = 6.4 points.
    """
    words = [
        "table=unreasonable_table3",
        f"runs_dir={tmp_path}",
        "hardware=h100_80x1",
        "plan.lines=1",
    ]
    told = planned(*words)[0]
    row = r"^250 questions, mean of 12 scores \(assumed correlation 0\.5\) +6\.4 "
    assert re.search(row, told, re.M)
    few = planned(*words, "every.eval.limit=100")[0]
    assert re.search(r"^100 questions, mean of 12 scores .*\) +10\.\d ", few, re.M)
