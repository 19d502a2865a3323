"""The parts of a plan as text: problems, notes, kinds of runs, and details."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from pipeline.config.stages import EvalStage, MergeStage, SelectStage, TrainStage
from pipeline.errors import PipelineError, first_few
from pipeline.estimate.durations import guess, memory_here
from pipeline.estimate.gpu_budget import Bill
from pipeline.estimate.models import shape_for
from pipeline.estimate.training_rows import expected_size
from pipeline.progress import format_duration
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Run
from pipeline.stages.evaluation import is_bundle
from pipeline.stages.merge import layers_of
from pipeline.text import align_columns

WIDTH = 120
KINDS = {
    "data": "training sets",
    "sft": "trainings",
    "cpt": "trainings",
    "merge": "merges written",
    "analyze": "maps of changes",
}
MERGED, CHOOSING = "scores of merges", "choosing snapshots"
TOLD = 3  # merges of a kind that are named


def wrapped(text: str, first: str = "") -> list[str]:
    """Wrap a text. Runs are named without their hashes.

    `first` stands before the first line.
    """
    without_hashes = re.sub(r"(?<![^\s(])([\w.+@-]+?)-[0-9a-f]{12}\b", r"\1", text)
    return textwrap.wrap(
        without_hashes,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * (len(first) or 2),
        break_on_hyphens=False,
        break_long_words=False,
    )


def marked(label: str, texts: Iterable[str]) -> list[str]:
    """Return the lines of texts, each with a label before its first line."""
    lines = []
    for text in texts:
        lines += wrapped(text, f"{label:<5} ")
    return lines


def span(values: Iterable[float], text: Callable[[float], str]) -> str:
    """Return the range of values, as in "2 to 5", or one number if they are equal."""
    numbers = list(values)
    if not numbers:
        return "?"
    least, largest = text(min(numbers)), text(max(numbers))
    if least == largest:
        return least
    return f"{least} to {largest}"


# --- kinds of runs ---


def by_kind(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each kind.

    Kinds are those of KINDS, scores for choosing snapshots, other scores, and scores of merges in
    memory. Selections and averages take no time and are left out.
    """
    selections = [run for run in runs if isinstance(run.config, SelectStage)]
    choosing = {run.hash for run in order_runs(selections)}
    names = [*dict.fromkeys(KINDS.values()), CHOOSING, "scores", MERGED]
    kinds: dict[str, list[Run]] = {name: [] for name in names}
    for run in runs:
        config = run.config
        if isinstance(config, EvalStage):
            kind = "scores"
            if run.hash in choosing:
                kind = CHOOSING
            elif config.merge:
                kind = MERGED
        else:
            kind = KINDS.get(config.stage, "")
        if kind and not is_bundle(run):
            kinds[kind].append(run)
    return {kind: members for kind, members in kinds.items() if members}


def kinds_table(
    runs: Sequence[Run],
    waiting: Sequence[Run],
    reasons: Iterable[str],
    bill: Bill | None,
) -> list[str]:
    """Return a line for each kind of runs: counts, finished runs, and costs of one and of all.

    Args:
        runs: the runs of the plan.
        waiting: evaluations whose model is still to be chosen.
        reasons: the hashes of the unfinished runs.
        bill: the costs on GPUs, or None.
    """
    unfinished, planned, later = set(reasons), by_kind(runs), by_kind(waiting)
    columns = ["time each", "in all", "GB"]
    if bill:
        columns = ["GPUs each", "time each", "GPU-hours", "GB a GPU"]
    rows: list[tuple[str, ...]] = [("", "runs", "done", *columns)]
    for kind in dict.fromkeys([*planned, *later]):
        members, further = planned.get(kind, []), later.get(kind, [])
        remaining = [run for run in members if run.hash in unfinished]
        count = f"{len(members):,}"
        if further:
            count += f" + {len(further):,}"
        done = f"{len(members) - len(remaining):,}"
        cells = on_this_machine([*remaining, *further])
        if bill:
            cells = on_gpus([*remaining, *further], bill)
        rows.append((kind, count, done, *cells))
    return align_columns(rows, right=range(1, len(rows[0])))


def on_this_machine(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the time of a run, the time of all runs, and the memory, on this machine."""
    if not runs:
        return "", "", ""
    known = [seconds for seconds in map(guess, runs) if seconds is not None]
    total = "?"
    if len(known) == len(runs):
        total = format_duration(sum(known))
    return span(known, format_duration), total, memory_text(map(memory_here, runs))


def on_gpus(runs: Sequence[Run], bill: Bill) -> tuple[str, ...]:
    """Return the GPUs and the time of a run, the GPU-hours of all runs, and the memory."""
    hashes = {run.hash for run in runs}
    costs = [cost for cost in bill.costs if cost.run.hash in hashes]
    if not costs:
        return "", on_this_machine(runs)[0], "", ""
    seconds = [3600 * cost.hours / cost.gpus for cost in costs]
    return (
        span((cost.gpus for cost in costs), str),
        span(seconds, format_duration),
        f"{sum(cost.hours for cost in costs):,.1f}",
        memory_text(cost.memory for cost in costs),
    )


def memory_text(sizes: Iterable[float | None]) -> str:
    """Return the largest of some sizes, in GB."""
    largest = max(filter(None, sizes), default=0.0)
    if largest >= 10e9:
        return f"{largest / 1e9:.0f}"
    if largest:
        return f"{largest / 1e9:.1f}"
    return ""


# --- details ---


def training_details(runs: Sequence[Run]) -> str:
    """Describe trainings: methods, rows, steps, batch size, tokens and learning rate."""
    trainings = [run for run in runs if isinstance(run.config, TrainStage)]
    if not trainings:
        return ""
    settings = [run.config.sft for run in trainings]
    sizes = zip(*map(expected_size, trainings), strict=True)
    rows, steps, tokens = ([count for count in counts if count is not None] for counts in sizes)
    millions = span((count / 1e6 for count in tokens), "{:,.3g}".format)
    methods = ", ".join(dict.fromkeys(sft.name or sft.method for sft in settings))
    batch = span((sft.batch_size for sft in settings), str)
    rate = span((sft.learning_rate for sft in settings), "{:.3g}".format)
    return (
        f"trainings: {methods}; {span(rows, '{:,.0f}'.format)} rows in"
        f" {span(steps, '{:,.0f}'.format)} steps of {batch}, {millions} million tokens, rate"
        f" {rate}"
    )


def merge_details(runs: Sequence[Run]) -> str:
    """Describe what the merges do, in the layers of their model."""
    texts_of: dict[str, dict[str, None]] = {}
    for run in runs:
        if isinstance(run.config, EvalStage | MergeStage) and run.config.merge:
            merge, layers = run.config.merge, layers_of(run.parents) or known_layers(run)
            text = merge.described(run.config.partition, layers)
            texts_of.setdefault(merge.method, {})[text] = None
    parts = []
    for method, texts in texts_of.items():
        parts.append(f"{method}: {first_few(list(texts), TOLD, '; ')}")
    if parts:
        return f"merges: {'. '.join(parts)}"
    return ""


def known_layers(run: Run) -> int | None:
    """Return the number of layers of a model that is not downloaded, if its name is known."""
    with suppress(PipelineError):
        return shape_for(run).layers
    return None


def score_details(runs: Sequence[Run]) -> str:
    """Describe scores: tasks, shots, languages, dtype and backend."""
    tasks: dict[str, None] = {}
    languages: dict[str, None] = {}
    ways: dict[str, None] = {}
    for run in runs:
        if not isinstance(run.config, EvalStage) or is_bundle(run):
            continue
        config = run.config.eval
        for task in config.tasks:
            tasks[f"{task.task} {task.num_fewshot}-shot"] = None
        languages |= dict.fromkeys(run.config.languages)
        ways[f"{config.dtype} ({config.products} products) by {config.backend}"] = None
    if tasks:
        how = "; ".join(sorted(ways))
        return f"scores: {', '.join(tasks)} in {', '.join(languages)}; scored in {how}"
    return ""
