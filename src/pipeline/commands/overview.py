"""The first screen of a plan: the total, what to fix and to know, kinds of runs, details, and what
is next.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline.benchmarks.harness import ASSUMED_QUESTIONS
from pipeline.config.stages import EvalStage, MergeStage, SelectStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.estimate.durations import History, memory_here
from pipeline.estimate.gpu_budget import Bill, Cost
from pipeline.estimate.models import shape_for
from pipeline.estimate.questions import count_questions
from pipeline.estimate.training_rows import expected_size
from pipeline.progress import format_duration
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Run
from pipeline.stages.evaluation import is_bundle
from pipeline.stages.merge import layers_of
from pipeline.text import align_columns, first_few

WIDTH, LINES = 120, 24
KINDS = {
    "data": "training sets",
    "sft": "trainings",
    "cpt": "trainings",
    "merge": "merges written",
    "analyze": "maps of changes",
}
MERGED, CHOOSING = "scores of merges", "choosing snapshots"
TOLD = 3  # kinds of merges, and tasks, that are named


@dataclass
class Overview:
    """What a plan decides.

    fix: why it would fail; know: what a reader should know before it is started; without: what the
    total leaves out, in words.
    """

    title: str
    total: str
    table: list[str]
    details: list[str]
    next: str
    fix: list[str] = field(default_factory=list)
    know: list[str] = field(default_factory=list)
    without: str = ""

    def lines(self) -> list[str]:
        """At most LINES lines of WIDTH columns (but for a longer command): of what to fix and to
        know, as much as there is room for.
        """
        for width in (2, 1):  # lines of a detail
            details = []
            for text in self.details:
                for line in wrapped(text, width):
                    details.append(line)
            room = LINES - 4 - len(self.table) - len(details)
            if room >= len(self.fix) + len(self.know):
                break
        fix = marked("FIX", self.fix, max(2, room - len(self.know)))
        know = marked("KNOW", self.know, max(2, room - len(fix)))
        lines = [
            *wrapped(self.title, 1),
            *wrapped(self.total, 2),
            *fix,
            *know,
            *self.table,
            *details,
        ]
        first = ""
        if self.fix:
            first = f"fix {'it' if len(self.fix) == 1 else 'these'}, then run "
        return [*lines[: LINES - 1], f"Next: {first}{self.next}"]


def wrapped(text: str, line_limit: int, first: str = "") -> list[str]:
    """Wrap a text into at most `line_limit` lines.

    Runs are named without their hashes. A text that is cut ends with an ellipsis.
    """
    return textwrap.wrap(
        re.sub(r"(?<![^\s(])([\w.+@-]+?)-[0-9a-f]{12}\b", r"\1", text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * (len(first) or 2),
        max_lines=line_limit,
        placeholder=" …",
        break_on_hyphens=False,
    )


def marked(label: str, texts: Sequence[str], line_limit: int) -> list[str]:
    """Texts with a label before the first, in at most `line_limit` lines: two lines each where
    these fit, the first texts first; the last line counts those left out.
    """
    if len(texts) <= line_limit:
        shown = texts
    else:
        shown = texts[: line_limit - 1]
    lines: list[str] = []
    for index, text in enumerate(shown):
        later = len(shown) - index - 1 + (len(texts) > len(shown))
        room = 1
        if len(lines) + 2 + later <= line_limit:
            room = 2
        lines += wrapped(text, room, " " * 6 if index else f"{label:<5} ")
    omitted = len(texts) - len(shown)
    if omitted:
        return [*lines, f"{'' if lines else label:<5} and {omitted} more: plan.lines=1 prints them"]
    return lines


def span(values: Iterable[float], text: Callable[[float], str]) -> str:
    """Return the least and the largest value, as in "2 to 5", or one number if they are equal."""
    numbers = list(values)
    if numbers:
        ends = dict.fromkeys(text(end(numbers)) for end in (min, max))
    else:
        ends = {"?": None}
    return " to ".join(ends)


# --- kinds of runs ---


def by_kind(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Kind -> its runs: training sets, trainings, what choosing snapshots scores, scores, those of
    merges in memory. Selections, and averages of several scores, take no time of their own.
    """
    choosing = {
        run.hash for run in order_runs([run for run in runs if isinstance(run.config, SelectStage)])
    }
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        config = run.config
        if isinstance(config, EvalStage):
            if run.hash in choosing:
                kind = CHOOSING
            else:
                kind = MERGED if config.merge else "scores"
        else:
            kind = KINDS.get(config.stage, "")
        if kind and not is_bundle(run):
            kinds.setdefault(kind, []).append(run)
    return {
        kind: kinds[kind]
        for kind in [*dict.fromkeys(KINDS.values()), CHOOSING, "scores", MERGED]
        if kind in kinds
    }


def kinds_table(
    runs: Sequence[Run],
    waiting: Sequence[Run],
    reasons: Iterable[str],
    bill: Bill | None,
    history: History,
) -> list[str]:
    """Return a line for each kind of runs: how many, how many are done, and what one and all take.

    Args: waiting: the choices that are still open.
    """
    unfinished, planned, later = set(reasons), by_kind(runs), by_kind(waiting)
    costs = None
    if bill:
        costs = {cost.run.hash: cost for cost in bill.costs()}
    takes_what = (
        ("GPUs each", "time each", "GPU-hours", "GB a GPU")
        if bill
        else ("time each", "in all", "GB")
    )
    rows: list[tuple[str, ...]] = [("", "runs", "done", *takes_what)]
    for kind in dict.fromkeys([*planned, *later]):
        members, further = planned.get(kind, []), later.get(kind, [])
        remaining = [run for run in members if run.hash in unfinished]
        count = f"{len(members):,}" + f" + {len(further):,}" * bool(further)
        done = f"{len(members) - len(remaining):,}"
        rows.append((kind, count, done, *takes([*remaining, *further], costs, history)))
    return align_columns(rows, right=range(1, len(rows[0])))


def takes(runs: Sequence[Run], costs: dict[str, Cost] | None, history: History) -> tuple[str, ...]:
    """Return what runs of a kind take: on the GPUs of a bill, else on this machine."""
    if not runs:
        return ("",) * (3 if costs is None else 4)
    if costs is None:
        seconds, memory = (
            [history.predict(run) for run in runs],
            memory_text(map(memory_here, runs)),
        )
        if any(history.needs_gpu(run, value) for run, value in zip(runs, seconds, strict=True)):
            return "needs a GPU", "?", memory
        known_seconds = []
        for value in seconds:
            if value is not None:
                known_seconds.append(value)
        total = "?"
        if len(known_seconds) == len(runs):
            total = format_duration(sum(known_seconds))
        return span(known_seconds, format_duration), total, memory
    known_costs = []
    for run in runs:
        if run.hash in costs:
            known_costs.append(costs[run.hash])
    if not known_costs:
        if not isinstance(runs[0].config, TrainStage | EvalStage):  # of the CPU
            return "", takes(runs, None, history)[0], "", ""
        # whose memory is known without rows
        trainings = []
        for run in runs:
            if isinstance(run.config, TrainStage):
                trainings.append(run)
        return "?", "?", "?", memory_text(memory_here(run, on_gpu=True) for run in trainings)
    seconds_each = [3600 * cost.hours / cost.gpus for cost in known_costs]
    hours = f"{sum(cost.hours for cost in known_costs):,.1f}"
    return (
        span((cost.gpus for cost in known_costs), str),
        span(seconds_each, format_duration),
        hours,
        memory_text(cost.memory for cost in known_costs),
    )


def memory_text(sizes: Iterable[float | None]) -> str:
    """Return the largest of some sizes, in GB."""
    largest = max(filter(None, sizes), default=0.0)
    if largest:
        return f"{largest / 1e9:.{0 if largest >= 10e9 else 1}f}"
    return ""


# --- details ---


def training_details(runs: Sequence[Run]) -> list[str]:
    """Describe trainings in a line: methods, rows, steps, batch, tokens, learning rate, dtypes and
    epochs.
    """
    trainings = []
    for run in runs:
        if isinstance(run.config, TrainStage):
            trainings.append(run)
    if not trainings:
        return []
    settings = [run.config.sft for run in trainings]
    sizes = zip(*map(expected_size, trainings), strict=True)
    rows, steps, tokens = ([count for count in counts if count is not None] for counts in sizes)
    millions = span((count / 1e6 for count in tokens), "{:,.3g}".format)

    def of_knob(name: str, form: str = "{}") -> str:
        return span((getattr(sft, name) for sft in settings), form.format)

    methods = ", ".join(dict.fromkeys(sft.name or sft.method for sft in settings))
    dtypes = dict.fromkeys(f"{sft.weights} weights, {sft.precision} products" for sft in settings)
    unknown = ""
    if len(rows) < len(trainings):
        unknown = f" ({len(trainings) - len(rows)} of {len(trainings)} not known yet)"
    return [
        f"trainings: {methods}; {span(rows, '{:,.0f}'.format)} rows in"
        f" {span(steps, '{:,.0f}'.format)} steps of {of_knob('batch_size')}{unknown}, {millions}"
        f" million tokens, rate {of_knob('learning_rate', '{:.3g}')}, {', '.join(dtypes)},"
        f" sft.epochs {of_knob('epochs')}"
    ]


def merge_details(runs: Sequence[Run]) -> list[str]:
    """Describe in a line what the merges do, in the layers of their model."""
    texts_of: dict[str, dict[str, None]] = {}
    for run in runs:
        if isinstance(run.config, EvalStage | MergeStage):
            merge = run.config.merge
            if merge:
                text = merge.described(
                    run.config.partition, layers_of(run.parents) or known_layers(run)
                )
                texts_of.setdefault(merge.method, {})[text] = None
    parts = [
        f"{method}: {'; '.join(first_few(list(texts), TOLD))}" for method, texts in texts_of.items()
    ]
    if parts:
        return [f"merges: {'. '.join(parts)}"]
    return []


def known_layers(run: Run) -> int | None:
    """Return the number of layers of a model that is not on this disk, if its name is known."""
    with suppress(PipelineError):
        return shape_for(run).layers
    return None


def score_details(runs: Sequence[Run]) -> list[str]:
    """Describe scores in a line: tasks with shots and questions, languages, dtype, products and
    backend.
    """
    scores = []
    for run in runs:
        if isinstance(run.config, EvalStage) and not is_bundle(run):
            scores.append(run)
    sizes: dict[str, list[int]] = {}
    limits: dict[str, int] = {}
    how: dict[str, None] = {}
    for run in scores:
        config, task = run.config.eval, run.config.eval.tasks[0]
        name = f"{task.task} {task.num_fewshot}-shot"
        limits[name] = config.limit or 0
        sizes.setdefault(name, []).extend(
            count_questions(run, asked_task, language)
            for asked_task in config.tasks
            for language in run.config.languages
        )
        how[f"{config.dtype} ({config.products} products) by {config.backend}"] = None
    tasks = []
    for name, counts in sizes.items():
        note = ""
        if max(counts) < limits[name]:
            note = ", fewer than eval.limit"
        if all(count % ASSUMED_QUESTIONS == 0 for count in counts):
            note = ", not counted"
        tasks.append(f"{name} ({span(counts, '{:,.0f}'.format)} questions{note})")
    languages = ", ".join(
        dict.fromkeys(language for run in scores for language in run.config.languages)
    )
    if tasks:
        return [f"scores: {', '.join(tasks)} in {languages}; scored in {'; '.join(sorted(how))}"]
    return []
