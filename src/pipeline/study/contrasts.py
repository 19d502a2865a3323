"""The smallest difference that a table's contrasts could show, before anything is made."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.stages import DataStage, EvalStage
from pipeline.runs.run import Run
from pipeline.study.cells import Cell, ScoreRef
from pipeline.study.cost import smallest_difference
from pipeline.study.planning import Planning

DISCORDANT = 0.2  # the share of answers that are right for one model alone: assumed until scores are there
QUESTIONS = {"mgsm": 250, "mgsm_direct": 250, "mgsm_en_cot": 250, "belebele": 900, "global_mmlu": 14042, "mbpp": 500}


def contrasts(planning: Planning) -> list[str]:
    """A line for each of `compare`: the cells that stand on the most questions, and what these could show.

    Only different questions count: a mean over seeds or models asks the same again, which lessens other noise alone.
    """
    lines = []
    cells = planning.plan.cells
    for left, right in planning.plan.compare:
        counts = [
            questions(planning, cell)
            for place, cell in cells.items()
            if left in place and tuple(right if one == left else one for one in place) in cells
        ]
        asked = [count for count in counts if count]
        if asked:
            least, most = (100 * smallest_difference(count, DISCORDANT) for count in (min(asked), max(asked)))
            told = f"{least:.1f} points on {min(asked)} questions"
            told += f", {most:.1f} on {max(asked)}" if max(asked) > min(asked) else ""
            lines.append(f"{left} against {right} could show {told}")
    note = f"(two-sided 5 %, power 80 %, {DISCORDANT:.0%} of answers right for one of the two alone)"
    return [*lines, note] if lines else []


def questions(planning: Planning, cell: Cell) -> int:
    """Different questions under a cell, of tasks whose answers are right or wrong."""
    if cell.of:
        return sum(questions(planning, planning.plan.cells[row, cell.column]) for row in cell.of)
    asked: dict[tuple[str, str], int] = {}
    for item in cell.items:
        for reading in item.readings:
            score = next(iter(reading.values()))
            if found := of_score(planning, score):
                asked[found[0], score.language] = found[1]
    return sum(asked.values())


def of_score(planning: Planning, score: ScoreRef) -> tuple[str, int] | None:
    """(task, questions) of one score; None for translations, and where its data is not known."""
    run = planning.evaluation(score) or planning.like(score)
    if run is None:
        return None
    task, asked = run.config.eval.tasks[0].task, run.config.eval
    there = held(run, task) if task in QUESTIONS else None
    return (task, min(there, asked.limit or there)) if there else None


def held(run: Run[EvalStage], task: str) -> int | None:
    data = run.parents.get("data_root")
    expert = data.config.expert if isinstance(data, Run) and isinstance(data.config, DataStage) else None
    if expert and expert.items:
        return expert.items.test if run.config.eval.split == "test" else expert.items.dev
    if expert and expert.world:
        return expert.world.items if run.config.eval.split == "test" else expert.world.dev_items
    if data is None:
        return QUESTIONS[task]
    file = Path(data.folder) / task.partition("_")[0] / run.config.languages[0] / "test.jsonl"
    if not file.is_file():
        return None
    with open(file, "rb") as lines:
        return sum(1 for _ in lines)
