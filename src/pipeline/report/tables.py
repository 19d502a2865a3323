"""A table of finished evaluations as scores.json, table.md, table.csv and one self-contained index.html.

Nothing here trains, scores or guesses: what an evaluation did not write is shown as missing, with the reason. The same
results give the same bytes.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.report.scores import AVERAGE, PRIMARY, Record, family, label, load
from pipeline.report.statistics import mean, standard_deviation

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
    filter: str | None
    label: str = ""


@dataclass(frozen=True)
class Cell:
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
class Table:
    """rows x columns -> Cell. groups: (target, its columns) in order; notes: how to read it; missing: reasons."""

    rows: list[str]
    columns: list[Column]
    cells: dict[tuple[str, Column], Cell]
    notes: list[str]
    missing: list[str]

    def groups(self) -> list[tuple[str, list[Column]]]:
        targets = dict.fromkeys(column.target for column in self.columns)
        return [(target, [column for column in self.columns if column.target == target]) for target in targets]


def build(results: Mapping[str, Any], folder: Path) -> Path:
    """Write the report of one table into `folder` and return the path of its index.html.

    results: what the table stage gathered: table, title, note, command, languages, seeds, row_order, cells, trainings,
    failed, seconds, versions, machine, git; optionally roles {row: base|expert|merge} (else by the rows' names).
    Writes scores.json, table.md, table.csv, index.html and plots/*.png (for tracking). Raises PipelineError where two
    evaluations claim one cell or a file is not JSON.
    """
    from pipeline.report.page import write_page  # stands on this module

    folder.mkdir(parents=True, exist_ok=True)
    scores, problems = load(results)
    table = tabulate(results, scores, problems)
    flat = [{key: value for key, value in score.items() if key not in ("where", "label")} for score in scores]
    text = json.dumps(flat, indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False)
    (folder / "scores.json").write_text(text + "\n", encoding="utf-8")
    (folder / "table.md").write_text(markdown(results, table), encoding="utf-8")
    (folder / "table.csv").write_text(comma_separated(table), encoding="utf-8")
    return write_page(results, table, scores, folder)


# --------------------------------------------------------------------------------------------------- the table


def column_of(record: Record) -> Column:
    """Where a record stands in the table; tabulate may lengthen the label."""
    told = {key: record[key] for key in ("target", "task", "where", "num_fewshot", "metric", "label")}
    return Column(**told, filter=record.get("filter"))


def tabulate(
    results: Mapping[str, Any], scores: Sequence[Record], problems: Mapping[tuple[str, str], list[str]]
) -> Table:
    """The primary scores as a table. Rows and languages that only cells name come after those of the lists."""
    cells = results["cells"]
    rows = list(dict.fromkeys([*results["row_order"], *(cell["row"] for cell in cells)]))
    targets = list(dict.fromkeys([*results["languages"], *(cell["language"] for cell in cells)]))
    by_place: dict[tuple[str, Column], dict[int, Record]] = {}
    for record in scores:
        if record["primary"]:
            column = column_of(record)
            seeds = by_place.setdefault((record["row"], column), {})
            other = seeds.setdefault(record["seed"], record)
            if other["eval"] != record["eval"]:
                place = f"{record['row']}, {column.label}, seed {record['seed']}"
                raise PipelineError(
                    f"{place} has two evaluations, {other['eval']} and {record['eval']}: keep one in cells"
                )
    if len(results["languages"]) > 1:
        by_place |= _averages(by_place, results["languages"])
    by_place = _told_apart(by_place)
    columns = sorted({column for _, column in by_place}, key=lambda column: _order(column, targets))
    filled = {
        (row, column): _cell(by_place[row, column], len(results["seeds"]), column)
        if (row, column) in by_place
        else Cell(reason=_reason(row, column, results, problems))
        for row in rows
        for column in columns
    }
    filled = {place: _with_seeds(cell, by_place.get(place, {}), results["seeds"]) for place, cell in filled.items()}
    for column in columns:
        top = max(
            (cell.number for (_, c), cell in filled.items() if c == column and cell.value is not None),
            key=float,
            default="",
        )
        filled |= {
            place: replace(cell, best=True)
            for place, cell in filled.items()
            if place[1] == column and cell.number == top
        }
    return Table(rows, columns, filled, _notes(results, columns, by_place, filled), _missing(rows, columns, filled))


def _told_apart(
    by_place: Mapping[tuple[str, Column], dict[int, Record]],
) -> dict[tuple[str, Column], dict[int, Record]]:
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
        parts += [str(column.filter)] if len({c.filter for c in alike}) > 1 else []
        told[row, replace(column, label=", ".join(parts))] = seeds
    return told


def _averages(by_place: Mapping[tuple[str, Column], dict[int, Record]], languages: Sequence[str]) -> dict:
    """A further column a task: the mean over the target languages, for each seed that every language has.

    No standard error: languages share their questions, so their errors are not independent.
    """
    gathered: dict[tuple[str, Column], dict[str, dict[int, Record]]] = {}
    for (row, column), seeds in by_place.items():
        where = "-".join(AVERAGE if part == column.target else part for part in column.where.split("-"))
        average_of = replace(column, target=AVERAGE, where=where, label=label(column.task, where, AVERAGE, True))
        gathered.setdefault((row, average_of), {})[column.target] = seeds
    averages: dict[tuple[str, Column], dict[int, Record]] = {}
    for place, by_language in gathered.items():
        if set(by_language) < set(languages):
            continue
        for seed in sorted(set.intersection(*(set(by_language[language]) for language in languages))):
            records = [by_language[language][seed] for language in languages]
            if all(record["value"] is not None for record in records):
                name = " + ".join(record["eval"] for record in records)
                average = {
                    "value": mean([record["value"] for record in records]),
                    "stderr": None,
                    "n": None,
                    "eval": name,
                }
                averages.setdefault(place, {})[seed] = average
    return averages


def _order(column: Column, targets: Sequence[str]) -> tuple:
    families = list(PRIMARY)
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
        column.filter or "",
    )


def _cell(by_seed: Mapping[int, Record], seeds: int, column: Column) -> Cell:
    """Mean and standard deviation over seeds; of a single evaluation, its value and standard error."""
    scale = 1 if column.metric.lower().startswith(OUT_OF_100) else 100
    distinct = list({record["eval"]: record for record in by_seed.values()}.values())  # the base serves every seed
    values = [scale * record["value"] for record in distinct if record["value"] is not None]
    if not values:
        reasons = dict.fromkeys(record["reason"] for record in distinct if record.get("reason"))
        return Cell(reason="; ".join(reasons) or "the score is not a finite number")
    if len(values) > 1:
        return Cell(mean(values), standard_deviation(values))
    error = next(record["stderr"] for record in distinct if record["value"] is not None)
    return Cell(values[0], None if error is None else scale * error, "†" if seeds > 1 else "")


def _with_seeds(cell: Cell, by_seed: Mapping[int, Record], seeds: Sequence[int]) -> Cell:
    """Say so where some seeds are missing from a mean over seeds."""
    lost = [seed for seed in seeds if seed not in by_seed or by_seed[seed]["value"] is None]
    one_model = len({record["eval"] for record in by_seed.values()}) == 1
    if cell.value is None or not lost or one_model:
        return cell
    reason = f"without seed {', '.join(map(str, lost))}"
    return replace(cell, mark=f"{cell.mark} ({len(seeds) - len(lost)}/{len(seeds)})", reason=reason)


def _reason(row: str, column: Column, results: Mapping[str, Any], problems: Mapping[tuple[str, str], list[str]]) -> str:
    if column.target == AVERAGE:
        return "not scored in every language"
    if found := problems.get((row, column.target)):
        return "; ".join(found)
    if any(cell["row"] == row and cell["language"] == column.target for cell in results["cells"]):
        return "its evaluation holds no such score"
    return "no finished evaluation" + (" (see the failed runs)" if results.get("failed") else "")


def _missing(rows: Sequence[str], columns: Sequence[Column], cells: Mapping[tuple[str, Column], Cell]) -> list[str]:
    """One line for each row and reason, naming the columns. What is missing from an average is named where it arose."""
    lines = []
    own = [column for column in columns if column.target != AVERAGE]
    for row in rows:
        by_reason: dict[str, list[Column]] = {}
        for column in own:
            if reason := cells[row, column].reason:
                by_reason.setdefault(reason, []).append(column)
        for reason, gone in by_reason.items():
            named = []
            for target in dict.fromkeys(column.target for column in gone):
                labels = [column.label for column in gone if column.target == target]
                whole = len(labels) > 1 and len(labels) == sum(column.target == target for column in own)
                named += [f"all of {target}"] if whole else labels
            lines.append(f"{row}, {'everything' if len(gone) == len(own) else ', '.join(named)}: {reason}.")
    return lines


def _notes(results: Mapping[str, Any], columns: Sequence[Column], by_place: Mapping, cells: Mapping) -> list[str]:
    """What a reader needs to read the numbers: n, shots, metric, filter, seeds, the meaning of ±."""
    told: dict[str, dict[str, str]] = {}
    for column in columns:
        if column.target == AVERAGE:
            continue
        counts = sorted({r["n"] for (_, c), seeds in by_place.items() if c == column for r in seeds.values() if r["n"]})
        how = [METRICS.get(column.metric, column.metric)]
        how += [column.filter] if column.filter not in (None, "none") else []
        title = label(column.task, "", "", False).strip()
        span = (
            "unknown"
            if not counts
            else str(counts[0])
            if len(counts) == 1
            else f"{counts[0]} to {counts[-1]} (rows differ)"
        )
        told.setdefault(f"{title}: {', '.join(how)}, {column.num_fewshot}-shot", {})[column.where] = span
    sentences = []
    for title, spans in told.items():
        alike = len(set(spans.values())) == 1
        each = " each" if len(spans) > 1 else ""
        n = (
            f"n = {next(iter(spans.values()))}{each}"
            if alike
            else ", ".join(f"n = {span} ({where})" for where, span in spans.items())
        )
        sentences.append(f"{title}, {n}")
    notes = ["; ".join(sentences) + "."] if sentences else []
    seeds = list(results["seeds"])
    if len(seeds) == 1:
        notes.append(
            f"Seed {seeds[0]}. Percent; chrF++ as it is. "
            "± is one standard error over the questions, where the harness gives it."
        )
    else:
        listed = ", ".join(map(str, seeds))
        notes.append(f"Seeds {listed}. Percent; chrF++ as it is. Mean ± standard deviation over seeds.")
        if any("†" in cell.mark for cell in cells.values()):
            notes.append("† one evaluation, not one a seed: ± is its standard error over the questions.")
        if any("/" in cell.mark for cell in cells.values()):
            notes.append(f"(k/{len(seeds)}) only k of {len(seeds)} seeds are there.")
    if any(column.target == AVERAGE for column in columns):
        notes.append(
            "Averages are over the target languages within a seed; "
            "a single evaluation's average has no ±, as languages share questions."
        )
    return notes


# -------------------------------------------------------------------------------------------------- as text


def markdown(results: Mapping[str, Any], table: Table) -> str:
    """The table with its notes; the best cell of each column is bold."""

    def line(parts: Sequence[str]) -> str:
        return "| " + " | ".join(part.replace("|", "\\|") for part in parts) + " |"

    lines = [f"# {results['title']}", ""]
    lines += [results["note"], ""] if results.get("note") else []
    lines += [line(["", *(column.label for column in table.columns)]), "|---|" + "---:|" * len(table.columns)]
    for row in table.rows:
        cells = [table.cells[row, column] for column in table.columns]
        lines.append(line([row, *(f"**{cell.text}**" if cell.best else cell.text for cell in cells)]))
    for paragraph in table.notes:
        lines += ["", paragraph]
    lines += ["", "Missing:", "", *(f"- {reason}" for reason in table.missing)] if table.missing else []
    failed = results.get("failed") or []
    lines += ["", "Failed runs:", "", *(f"- {run['name']}: {run['reason']}" for run in failed)] if failed else []
    return "\n".join(lines) + "\n"


def comma_separated(table: Table) -> str:
    """The same cells as CSV, without marks for the best."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["row", *(column.label for column in table.columns)])
    for row in table.rows:
        writer.writerow([row, *(table.cells[row, column].text for column in table.columns)])
    return buffer.getvalue()
