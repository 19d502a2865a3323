"""The table of a report: means over seeds and languages, their spread, and why anything is missing.

Nothing here trains, scores or guesses: what an evaluation did not write is shown as missing, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import mean
from pipeline.report.answers import Answers, Place
from pipeline.report.compare import (
    Comparison,
    Kept,
    averaged,
    compared,
    declared,
    headline,
    pairs_of,
    questions_of,
    stands_out,
)
from pipeline.report.contents import Results, Score
from pipeline.report.grid import Column, Entry, ScoreTable, column_of, percent
from pipeline.report.notes import notes_of
from pipeline.report.scores import AVERAGE, TITLES, family, label
from pipeline.report.statistics import standard_deviation

Seeds = dict[int, Score]
Places = dict[tuple[str, Column], Seeds]


def tabulate(
    results: Results,
    scores: Sequence[Score],
    problems: Mapping[tuple[str, str], list[str]],
    answers: Mapping[Place, Answers] | None = None,
) -> ScoreTable:
    """The primary scores as a table. Rows and languages that only cells name come after those of the lists.

    Raises PipelineError where two evaluations claim one cell.
    """
    rows = list(dict.fromkeys([*results.rows, *(cell.row for cell in results.cells)]))
    targets = list(dict.fromkeys([*results.languages, *(cell.language for cell in results.cells)]))
    by_place = _placed(scores)
    questions = {place: questions_of(seeds, answers or {}, not results.over) for place, seeds in by_place.items()}
    if len(results.languages) > 1:
        averages, of_averages = _averages(by_place, questions, results.languages)
        by_place, questions = by_place | averages, questions | of_averages
    titles = _told_apart(by_place)
    by_place = {(row, titles[column]): seeds for (row, column), seeds in by_place.items()}
    by_column: dict[Column, dict[str, Kept]] = {}
    for (row, column), each in questions.items():
        by_column.setdefault(titles[column], {})[row] = each
    columns = sorted(by_column, key=lambda column: _order(column, targets))
    filled = {
        (row, column): _entry(by_place[row, column], len(results.seeds), column)
        if (row, column) in by_place
        else Entry(reason=_reason(row, column, results, problems))
        for row in rows
        for column in columns
    }
    seeds_of = {row: sorted({cell.seed for cell in results.cells if cell.row == row}) for row in rows}
    filled = {place: _with_seeds(one, by_place.get(place, {}), seeds_of[place[0]]) for place, one in filled.items()}
    for place, seeds in by_place.items():
        names = dict.fromkeys(name for score in seeds.values() for name in score.eval.split(" + "))
        filled[place] = replace(filled[place], evals=tuple(names))
    for column in columns:
        known = {row: filled[row, column].value or 0.0 for row in rows if filled[row, column].value is not None}
        ranked = sorted(known, key=lambda row: -known[row])  # the nearest rival first
        top = ranked[0] if ranked else ""
        kept = {row: by_column[column].get(row, Kept()) for row in ranked}
        if top and top not in results.selected and stands_out(top, kept):
            filled[top, column] = replace(filled[top, column], best=True)
    notes = notes_of(results, columns, by_place, filled)
    blocks = _comparisons(results, rows, columns, filled, by_column)
    missing = _missing(rows, columns, filled)
    told = headline([declared(results.contrasts), *blocks])
    return ScoreTable(rows, columns, filled, notes, missing, blocks, told)


def _placed(scores: Sequence[Score]) -> Places:
    by_place: Places = {}
    for score in scores:
        if score.primary:
            column = column_of(score)
            other = by_place.setdefault((score.row, column), {}).setdefault(score.seed, score)
            if other.eval != score.eval:
                place = f"{score.row}, {column.label}, seed {score.seed}"
                raise PipelineError(f"{place} has two evaluations, {other.eval} and {score.eval}: keep one in cells")
    return by_place


def _comparisons(
    results: Results,
    rows: Sequence[str],
    columns: Sequence[Column],
    filled: Mapping[tuple[str, Column], Entry],
    by_column: Mapping[Column, Mapping[str, Kept]],
) -> list[Comparison]:
    """MGSM in the target languages, averages first: merges, but those chosen by these scores, against base and best
    expert."""
    role = roles(rows, results.roles)
    rows = [row for row in rows if row not in results.selected or role[row] == "expert"]
    blocks = []
    for column in columns:
        if column.task.startswith("mgsm") and column.where == column.target:
            values = {row: value for row in rows if (value := filled[row, column].value) is not None}
            pairs, expert = pairs_of([row for row in rows if row in values], role, values)
            if pairs:
                found = {row: by_column[column].get(row, Kept()) for row in values}
                blocks.append(compared(f"{column.label}, {column.num_fewshot}-shot", pairs, expert, found))
    return blocks


def roles(rows: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """row -> base, expert or merge: as given, else by its name. Trained mixtures count as merges: they are compared."""
    named = {
        row: "base" if row == "base" or row.startswith("base ") else "expert" if "expert" in row else "merge"
        for row in rows
    }
    return {row: given.get(row, named[row]) for row in rows}


def _told_apart(by_place: Places) -> dict[Column, Column]:
    """Name the shots, metric and filter in titles that would else be the same: unlike scores never share a column."""
    sharing: dict[str, set[Column]] = {}
    for _, column in by_place:
        sharing.setdefault(column.label, set()).add(column)
    told = {}
    for column in {column for _, column in by_place}:
        alike = sharing[column.label]
        parts = [column.label]
        parts += [f"{column.num_fewshot}-shot"] if len({c.num_fewshot for c in alike}) > 1 else []
        parts += [column.metric] if len({c.metric for c in alike}) > 1 else []
        parts += [column.filter] if len({c.filter for c in alike}) > 1 else []
        told[column] = replace(column, label=", ".join(parts))
    return told


def _averages(
    by_place: Places, questions: Mapping[tuple[str, Column], Kept], languages: Sequence[str]
) -> tuple[Places, dict[tuple[str, Column], Kept]]:
    """A further column a task: the mean over the target languages, for each seed that every language has; and the mean
    of each question over them, as they ask the same ones.

    No standard error: languages share their questions, so their errors are not independent.
    """
    gathered: dict[tuple[str, Column], dict[str, tuple[Seeds, Kept]]] = {}
    for (row, column), seeds in by_place.items():
        where = "-".join(AVERAGE if part == column.target else part for part in column.where.split("-"))
        average_of = replace(column, target=AVERAGE, where=where, label=label(column.task, where, AVERAGE, True))
        gathered.setdefault((row, average_of), {})[column.target] = seeds, questions[row, column]
    averages: Places = {}
    of_questions = {}
    for place, by_language in gathered.items():
        if set(by_language) < set(languages):
            continue
        for seed in sorted(set.intersection(*(set(by_language[language][0]) for language in languages))):
            scores = [by_language[language][0][seed] for language in languages]
            values = [score.value for score in scores if score.value is not None]
            if len(values) == len(scores):
                name = " + ".join(score.eval for score in scores)
                average = replace(scores[0], target=AVERAGE, eval=name, value=mean(values), stderr=None, n=0)
                averages.setdefault(place, {})[seed] = average
        if place in averages:
            of_questions[place] = averaged([by_language[language][1] for language in languages])
    return averages, of_questions


def _order(column: Column, targets: Sequence[str]) -> tuple:
    families = list(TITLES)
    known = family(column.task)
    return (
        targets.index(column.target) if column.target in targets else -1,  # averages first
        families.index(known) if known in families else len(families),
        column.task,
        column.where != column.target,
        not column.where.endswith(f"-{column.target}"),
        column.where,
        column.num_fewshot,
        column.metric,
        column.filter,
    )


def _entry(by_seed: Mapping[int, Score], seeds: int, column: Column) -> Entry:
    """Mean and standard deviation over seeds; of a single evaluation, its value and standard error."""
    scale = percent(column.metric)
    distinct = list({score.eval: score for score in by_seed.values()}.values())  # the base serves every seed
    values = [scale * score.value for score in distinct if score.value is not None]
    if not values:
        reasons = dict.fromkeys(score.reason for score in distinct if score.reason)
        return Entry(reason="; ".join(reasons) or "the score is not a finite number")
    if len(values) > 1:
        return Entry(mean(values), standard_deviation(values))
    error = next(score.stderr for score in distinct if score.value is not None)
    return Entry(values[0], None if error is None else scale * error, "†" if seeds > 1 else "")


def _with_seeds(entry: Entry, by_seed: Mapping[int, Score], seeds: Sequence[int]) -> Entry:
    """Say so where some seeds are missing from a mean over seeds."""
    lost = [seed for seed in seeds if seed not in by_seed or by_seed[seed].value is None]
    one_model = len({score.eval for score in by_seed.values()}) == 1
    if entry.value is None or not lost or one_model:
        return entry
    reason = f"without seed {', '.join(map(str, lost))}"
    return replace(entry, mark=f"{entry.mark} ({len(seeds) - len(lost)}/{len(seeds)})", reason=reason)


def _reason(row: str, column: Column, results: Results, problems: Mapping[tuple[str, str], list[str]]) -> str:
    if column.target == AVERAGE:
        return "not scored in every language"
    if found := problems.get((row, column.target)):
        return "; ".join(found)
    if any(cell.row == row and cell.language == column.target for cell in results.cells):
        return "its evaluation holds no such score"
    return "no finished evaluation" + (" (see the failed runs)" if results.failed else "")


def _missing(rows: Sequence[str], columns: Sequence[Column], filled: Mapping[tuple[str, Column], Entry]) -> list[str]:
    """One line for each row and reason, naming the columns. What is missing from an average is named where it arose."""
    lines = []
    own = [column for column in columns if column.target != AVERAGE]
    for row in rows:
        by_reason: dict[str, list[Column]] = {}
        for column in own:
            if reason := filled[row, column].reason:
                by_reason.setdefault(reason, []).append(column)
        for reason, gone in by_reason.items():
            named = []
            for target in dict.fromkeys(column.target for column in gone):
                labels = [column.label for column in gone if column.target == target]
                whole = len(labels) > 1 and len(labels) == sum(column.target == target for column in own)
                named += [f"all of {target}"] if whole else labels
            lines.append(f"{row}, {'everything' if len(gone) == len(own) else ', '.join(named)}: {reason}.")
    return lines
