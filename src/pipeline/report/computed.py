"""How the numbers of a table were computed, in sentences: dtypes, GPU-hours, how many configurations were tried, which
questions they were chosen on, and how many training rows overlap with benchmarks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from pipeline.config.evaluation import Eval
from pipeline.config.stages import DataStage, SelectStage, TrainStage
from pipeline.evaluate.selection import compared
from pipeline.report.cell_values import Outcome
from pipeline.report.expression import scores_under
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.run import Run
from pipeline.tables.plan import ScoreRef

# Counts of data runs' facts, in words
OVERLAPS = {"contaminated": "share an n-gram with a benchmark", "number_variants": "do so without their numbers"}


def describe_computation(outcome: Outcome, runs: Sequence[Run]) -> dict[str, list[str]]:
    """Title -> sentences about the finished ones of a table's runs; a title without any is left out."""
    finished = [(run, manifest) for run in runs if (manifest := read_manifest(run.folder)) is not None]
    scored = questions_of_cells(outcome)
    sentences = {
        "Dtypes": describe_dtypes(finished),
        "GPU time": describe_gpu_time(manifest for _, manifest in finished),
        "Configurations": [
            f"{count} times {text}" if count > 1 else text
            for text, count in Counter(describe_choices(outcome, scored) + describe_selections(runs, scored)).items()
        ],
        "Contamination": [
            sentence for run, manifest in finished if isinstance(run.config, DataStage)
            for sentence in describe_overlap(run.name, manifest)
        ],
    }  # fmt: skip
    return {title: listed for title, listed in sentences.items() if listed}


def describe_dtypes(finished: Iterable[tuple[Run, Manifest]]) -> list[str]:
    counts = Counter(
        f"trained in {run.config.sft.precision}" if isinstance(run.config, TrainStage)
        else f"scored in {manifest.facts['harness']['dtype']}"
        for run, manifest in finished
        if isinstance(run.config, TrainStage) or "harness" in manifest.facts
    )  # fmt: skip
    return [f"{what}: {'1 run' if count == 1 else f'{count} runs'}" for what, count in sorted(counts.items())]


def describe_gpu_time(manifests: Iterable[Manifest]) -> list[str]:
    """Seconds of a run times its processes, each of which has a GPU, by device; none is said, too."""
    hours: dict[str, float] = defaultdict(float)
    for manifest in manifests:
        device = manifest.machine.get("device", "cpu")
        processes = manifest.config.get("sft", {}).get("processes", 1)
        if device != "cpu":
            hours[device] += processes * manifest.seconds / 3600
    return [f"{count:.2f} GPU-hours on {device}" for device, count in sorted(hours.items())] or ["no run used a GPU"]


Questions = tuple[str, str, str]  # task, split, language


def questions_of_cells(outcome: Outcome) -> set[Questions]:
    plan = outcome.table.plan
    return questions_behind(outcome, (score for cell in plan.cells.values() for _, score in scores_under(plan, cell)))


def questions_behind(outcome: Outcome, scores: Iterable[ScoreRef]) -> set[Questions]:
    runs = {run.hash: run for score in scores if (run := outcome.table.evaluations.get(score))}
    return {one for run in runs.values() for one in questions(run.config.eval, run.config.languages)}


def questions(settings: Eval, languages: Iterable[str]) -> set[Questions]:
    return {(task.task, settings.split, language) for task in settings.tasks for language in languages}


def describe_choices(outcome: Outcome, scored: set[Questions]) -> list[str]:
    """Of the table's `best` rules."""
    sentences = []
    for choice in outcome.table.plan.choices.values():
        asked = questions_behind(outcome, (score for scores in choice.candidates.values() for score in scores))
        sentences.append(f"the best of {len(choice.candidates)} configurations by {describe(asked, scored)}")
    return sentences


def describe_selections(runs: Iterable[Run], scored: set[Questions]) -> list[str]:
    """Of selections of snapshots."""
    sentences = []
    for run in runs:
        if isinstance(run.config, SelectStage):
            select = run.config.select
            rule = "validation loss"
            if select.eval is not None:
                named = {one.language for one in [*(select.primary or []), *(select.guards or [])] if one.language}
                rule = describe(questions(select.eval, {*run.config.languages, *named}), scored)
            sentences.append(f"one of {len(compared(run))} snapshots by {rule}")
    return sentences


def describe(asked: set[Questions], scored: set[Questions]) -> str:
    """Tasks by split and languages, and whether the table reports scores on the same questions."""
    languages: dict[tuple[str, str], list[str]] = {}
    for task, split, language in sorted(asked):
        languages.setdefault((task, split), []).append(language)
    named = "; ".join(f"{task} ({split}: {', '.join(codes)})" for (task, split), codes in languages.items())
    shared = len(asked & scored)
    where = "all" if shared == len(asked) else "some" if shared else "none"
    return f"{named}, {where} of which the table scores, too" if asked else "scores that are not computed yet"


def describe_overlap(name: str, manifest: Manifest) -> list[str]:
    return [
        f"{name}, {source}: of {count['rows']:,} rows "
        + ", ".join(f"{count[key]:,} {words}" for key, words in OVERLAPS.items())
        + f"; {count['left']:,} rows were usable"
        for source, count in manifest.facts.get("counts", {}).items()
        if isinstance(count, Mapping) and "contaminated" in count
    ]
