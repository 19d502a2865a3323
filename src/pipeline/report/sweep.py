"""The page of a sweep: a map of score over configuration, and the best point's score on held-out questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.analyze.heatmaps import Map, svg_of_maps
from pipeline.benchmarks import kind_of, primary_metric
from pipeline.config.evaluation import is_flores
from pipeline.config.stages import SweepStage
from pipeline.errors import PipelineError
from pipeline.evaluate.records import read_scores
from pipeline.evaluate.shown_scores import percent_factor, primary_of
from pipeline.files import write_atomically
from pipeline.report.load.answers import Place, answers_of, sample_files
from pipeline.report.render.sheets import comma_separated
from pipeline.report.templates import render
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run
from pipeline.stats.statistics import is_mean_of, largest, split_half


def write_page(folder: Path, config: SweepStage, points: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> Path:
    """Write index.html, scores.csv and map.png of the points finished so far, by any shard; return index.html."""
    scores = {index: score for index, run in enumerate(runs) if (score := point_scores(run)) is not None}
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{config.merge.method} · {config.eval.label} · {', '.join(config.languages)}"
    picture, summary, notes = "", [], [f"{len(scores)} of {len(points)} points finished."]
    notes += [SENTENCES] if is_flores(config.eval) else []
    means = {index: fmean([fmean(task_scores) for task_scores in score]) for index, score in scores.items()}
    columns = [*points[0], "score", "run"]
    rows = [[*point.values(), means.get(index, ""), runs[index].name] for index, point in enumerate(points)]
    if scores:
        write_atomically(folder / "scores.csv", comma_separated([columns, *rows]))
        best = [*means][largest([*means.values()])]
        sizes = [len(task_scores) for task_scores in next(iter(scores.values()))]
        tasks = f" in {len(sizes)} tasks, the score is the mean over tasks" if len(sizes) > 1 else ""
        notes += [f"In percent, on {sum(sizes)} questions{tasks}. The best point is framed."]
        label = f"score over configuration: {title}"
        scale = (min(means.values()), max(means.values()))
        picture = svg_of_maps(maps_of(points, means, best), "sweep", label, scale, folder / "map.png")
        summary = split_half_summary(points, scores, means, best)
    shown = [[*map(str, values), "not finished" if score == "" else score, name] for *values, score, name in rows]
    tables = [("All points, with the runs that scored them.", columns, (0, len(columns) - 1), shown)]
    html = render("plain.html.j2", title=title, note=" ".join(notes), picture=picture, sentences=summary, tables=tables)
    write_atomically(folder / "index.html", html)
    return folder / "index.html"


def point_scores(run: Run) -> list[list[float]] | None:
    """Scores of a finished point in percent, a list of questions per task and language; None if unfinished."""
    return None if read_manifest(run.folder) is None else list(scores_in(run.folder).values())


SENTENCES = "Of translations a score is the mean chrF++ of sentences, which is not that of the set."


def scores_in(folder: Path) -> dict[Place, list[float]]:
    """Place -> scores of its questions by the task's primary metric, in percent; of questions with several steps the
    share of each in the mean over all steps; of translations each sentence's.

    Raises:
        PipelineError: a task's score is not the mean of its answers', such as a correlation.
    """
    scores = {}
    score_of = {(row.task, row.where): row.value for row in primary_of(read_scores(folder / "scores.json")[0])}
    for place, samples in sample_files(folder):
        metric, _ = primary_metric(place[1])
        values = list(answers_of(place, samples).by_question(metric).values())
        scores[place] = [percent_factor(metric) * value for value in values]
        shown = score_of[place[1:]]
        if kind_of(place[1]) != "translation" and (shown is None or not is_mean_of(shown, values)):
            problem = f"{metric} of {place[1]} is of all answers together, not of each, so that halves have none"
            raise PipelineError(f"{problem}: name another task, or choose in a table, by best: [AXIS]")
    return scores


def maps_of(points: Sequence[Mapping[str, Any]], means: Mapping[int, float], best: int) -> list[Map]:
    """Maps over the first two knobs that vary, one per combination of the others."""
    knobs = [key for key in points[0] if len({repr(point[key]) for point in points}) > 1] or list(points[0])[:1]
    down, across, *further_knobs = knobs if len(knobs) > 1 else ["", *knobs]
    map_cells = [(str(point.get(down, "")), str(point[across])) for point in points]
    rows, columns = (list(dict.fromkeys(side)) for side in zip(*map_cells, strict=True))
    panels: dict[str, dict[tuple[str, str], int]] = {}
    for index, point in enumerate(points):
        panels.setdefault(", ".join(f"{key} = {point[key]}" for key in further_knobs), {})[map_cells[index]] = index
    framed = rows.index(map_cells[best][0]), columns.index(map_cells[best][1])
    return [
        Map(
            title or "mean score", rows, columns,
            [[means.get(cells.get((row, column), -1)) for column in columns] for row in rows],
            down, across, framed if best in cells.values() else None,
        )
        for title, cells in panels.items()
    ]  # fmt: skip


def split_half_summary(
    points: Sequence[Mapping[str, Any]],
    scores: Mapping[int, list[list[float]]],
    means: Mapping[int, float],
    best: int,
) -> list[str]:
    """Sentences on the best point, and on the score of choosing on one half of the questions on the other half."""
    indices = list(scores)
    halves = split_half([scores[index] for index in indices])
    labels = [("odd", "even"), ("even", "odd")]
    lines = [
        f"Chosen on {on} questions: {point_name(points[indices[best_point]])}, scored {score:.1f} on {off} ones."
        for (on, off), (best_point, score) in zip(labels, halves, strict=True)
    ]
    lines += [f"Split-half score, the mean of both: {fmean([score for _, score in halves]):.1f}."] if halves else []
    first = (
        f"Best of {len(scores)}: {point_name(points[best])}, {means[best]:.1f}, "
        "chosen and scored on the same questions."
    )
    return [first, *lines]


def point_name(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in point.items())
