"""The table of a report: means over seeds and languages, their spread, and why anything is missing.

Nothing here trains, scores or guesses: what an evaluation did not write is shown as missing, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import mean
from pipeline.report.results import Results, Score
from pipeline.report.scores import AVERAGE, TITLES, family, label
from pipeline.report.statistics import standard_deviation

OUT_OF_100 = ("bleu", "spbleu", "chrf")  # metrics that come on the scale 0-100
METRICS = {"exact_match": "exact match", "acc": "accuracy", "chrf++": "chrF++", "pass_at_1": "pass@1"}
MISSING = "—"


@dataclass(frozen=True)
class Column:
    """One task in one language or pair (`where`), of the models made for the language `target`."""

    target: str
    task: str
    where: str
    num_fewshot: int
    metric: str
    filter: str
    label: str = ""


@dataclass(frozen=True)
class Entry:
    """What one place of the table shows: percent (BLEU and chrF++ as they are), spread, and why anything is missing."""

    value: float | None = None
    spread: float | None = None
    mark: str = ""
    reason: str = ""
    best: bool = False

    @property
    def number(self) -> str:
        return MISSING if self.value is None else f"{self.value:.1f}"

    @property
    def error(self) -> str:
        return ("" if self.spread is None else f" ± {self.spread:.1f}") + self.mark

    @property
    def text(self) -> str:
        return self.number + self.error


@dataclass(frozen=True)
class ScoreTable:
    """rows x columns -> Entry. groups: (target, its columns) in order; notes: how to read it; missing: reasons."""

    rows: list[str]
    columns: list[Column]
    entries: dict[tuple[str, Column], Entry]
    notes: list[str]
    missing: list[str]

    def groups(self) -> list[tuple[str, list[Column]]]:
        targets = dict.fromkeys(column.target for column in self.columns)
        return [(target, [column for column in self.columns if column.target == target]) for target in targets]


def column_of(score: Score) -> Column:
    """Where a score stands in the table; tabulate may lengthen the label."""
    return Column(score.target, score.task, score.where, score.num_fewshot, score.metric, score.filter, score.label)


def tabulate(results: Results, scores: Sequence[Score], problems: Mapping[tuple[str, str], list[str]]) -> ScoreTable:
    """The primary scores as a table. Rows and languages that only cells name come after those of the lists.

    Raises PipelineError where two evaluations claim one cell.
    """
    rows = list(dict.fromkeys([*results.rows, *(cell.row for cell in results.cells)]))
    targets = list(dict.fromkeys([*results.languages, *(cell.language for cell in results.cells)]))
    by_place: dict[tuple[str, Column], dict[int, Score]] = {}
    for score in scores:
        if score.primary:
            column = column_of(score)
            other = by_place.setdefault((score.row, column), {}).setdefault(score.seed, score)
            if other.eval != score.eval:
                place = f"{score.row}, {column.label}, seed {score.seed}"
                raise PipelineError(f"{place} has two evaluations, {other.eval} and {score.eval}: keep one in cells")
    if len(results.languages) > 1:
        by_place |= _averages(by_place, results.languages)
    by_place = _told_apart(by_place)
    columns = sorted({column for _, column in by_place}, key=lambda column: _order(column, targets))
    filled = {
        (row, column): _entry(by_place[row, column], len(results.seeds), column)
        if (row, column) in by_place
        else Entry(reason=_reason(row, column, results, problems))
        for row in rows
        for column in columns
    }
    filled = {place: _with_seeds(entry, by_place.get(place, {}), results.seeds) for place, entry in filled.items()}
    for column in columns:
        numbers = [filled[row, column].number for row in rows if filled[row, column].value is not None]
        top = max(numbers, key=float, default="")
        filled |= {
            (row, column): replace(filled[row, column], best=True) for row in rows if filled[row, column].number == top
        }
    notes = _notes(results, columns, by_place, filled)
    return ScoreTable(rows, columns, filled, notes, _missing(rows, columns, filled))


def _told_apart(
    by_place: Mapping[tuple[str, Column], dict[int, Score]],
) -> dict[tuple[str, Column], dict[int, Score]]:
    """Name the shots, metric and filter in titles that would else be the same: unlike scores never share a column."""
    sharing: dict[str, set[Column]] = {}
    for _, column in by_place:
        sharing.setdefault(column.label, set()).add(column)
    told = {}
    for (row, column), seeds in by_place.items():
        alike = sharing[column.label]
        parts = [column.label]
        parts += [f"{column.num_fewshot}-shot"] if len({c.num_fewshot for c in alike}) > 1 else []
        parts += [column.metric] if len({c.metric for c in alike}) > 1 else []
        parts += [column.filter] if len({c.filter for c in alike}) > 1 else []
        told[row, replace(column, label=", ".join(parts))] = seeds
    return told


def _averages(
    by_place: Mapping[tuple[str, Column], dict[int, Score]], languages: Sequence[str]
) -> dict[tuple[str, Column], dict[int, Score]]:
    """A further column a task: the mean over the target languages, for each seed that every language has.

    No standard error: languages share their questions, so their errors are not independent.
    """
    gathered: dict[tuple[str, Column], dict[str, dict[int, Score]]] = {}
    for (row, column), seeds in by_place.items():
        where = "-".join(AVERAGE if part == column.target else part for part in column.where.split("-"))
        average_of = replace(column, target=AVERAGE, where=where, label=label(column.task, where, AVERAGE, True))
        gathered.setdefault((row, average_of), {})[column.target] = seeds
    averages: dict[tuple[str, Column], dict[int, Score]] = {}
    for place, by_language in gathered.items():
        if set(by_language) < set(languages):
            continue
        for seed in sorted(set.intersection(*(set(by_language[language]) for language in languages))):
            scores = [by_language[language][seed] for language in languages]
            values = [score.value for score in scores if score.value is not None]
            if len(values) == len(scores):
                name = " + ".join(score.eval for score in scores)
                average = replace(scores[0], target=AVERAGE, eval=name, value=mean(values), stderr=None, n=0)
                averages.setdefault(place, {})[seed] = average
    return averages


def _order(column: Column, targets: Sequence[str]) -> tuple:
    families = list(TITLES)
    known = family(column.task)
    return (
        targets.index(column.target) if column.target in targets else len(targets),
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
    scale = 1 if column.metric.lower().startswith(OUT_OF_100) else 100
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


def _notes(
    results: Results,
    columns: Sequence[Column],
    by_place: Mapping[tuple[str, Column], dict[int, Score]],
    filled: Mapping[tuple[str, Column], Entry],
) -> list[str]:
    """What a reader needs to read the numbers: n, shots, metric, filter, seeds, the meaning of ±."""
    notes = ["; ".join(_counts(columns, by_place)) + "."] if columns else []
    seeds = list(results.seeds)
    if len(seeds) == 1:
        notes.append(
            f"Seed {seeds[0]}. Percent; chrF++ as it is. "
            "± is one standard error over the questions, where the harness gives it."
        )
    else:
        listed = ", ".join(map(str, seeds))
        notes.append(f"Seeds {listed}. Percent; chrF++ as it is. Mean ± standard deviation over seeds.")
        if any("†" in entry.mark for entry in filled.values()):
            notes.append("† one evaluation, not one a seed: ± is its standard error over the questions.")
        if any("/" in entry.mark for entry in filled.values()):
            notes.append(f"(k/{len(seeds)}) only k of {len(seeds)} seeds are there.")
    if any(column.target == AVERAGE for column in columns):
        notes.append(
            "Averages are over the target languages within a seed; "
            "a single evaluation's average has no ±, as languages share questions."
        )
    return notes


def _counts(columns: Sequence[Column], by_place: Mapping[tuple[str, Column], dict[int, Score]]) -> list[str]:
    """For each task its metric, filter and shots, and how many questions stand behind its numbers."""
    spans_of: dict[str, dict[str, str]] = {}
    for column in columns:
        if column.target == AVERAGE:
            continue
        counts = sorted({s.n for (_, c), seeds in by_place.items() if c == column for s in seeds.values() if s.n})
        how = [METRICS.get(column.metric, column.metric)]
        how += [column.filter] if column.filter != "none" else []
        title = label(column.task, "", "", False).strip()
        span = (
            "unknown"
            if not counts
            else str(counts[0])
            if len(counts) == 1
            else f"{counts[0]} to {counts[-1]} (rows differ)"
        )
        spans_of.setdefault(f"{title}: {', '.join(how)}, {column.num_fewshot}-shot", {})[column.where] = span
    sentences = []
    for title, spans in spans_of.items():
        alike = len(set(spans.values())) == 1
        each = " each" if len(spans) > 1 else ""
        n = (
            f"n = {next(iter(spans.values()))}{each}"
            if alike
            else ", ".join(f"n = {span} ({where})" for where, span in spans.items())
        )
        sentences.append(f"{title}, {n}")
    return sentences
