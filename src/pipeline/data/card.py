"""The data card of a training set: what was taken and from where, what was dropped and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.config import DataStage

if TYPE_CHECKING:
    from pipeline.data.benchmarks import Known

REASONS = ("empty", "duplicates", "contaminated", "word_problems")
HEAD = ("source", "hub id", "revision", "licence", "paper", "rows", "empty", "duplicates", "contaminated")
DONE = {"drop": "dropped", "count": "counted and kept"}


def card(config: DataStage, counts: dict[str, Any], known: Known, vouched: bool) -> str:
    """Markdown. counts: of each source its rows, each reason, and what is left and taken; then train, validation."""
    sources = config.expert.sources
    head = (*HEAD, "word problems", "left", "taken")
    lines = [
        f"# Training set of expert {config.expert.name}",
        "",
        f"{counts['train']} training rows, {counts['validation']} for validation.",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
    ]
    for name, source in sources.items():
        found = counts[name]
        where = source.hub or source.url or "local"
        cells = [name, where, source.revision or "not pinned", source.licence, source.paper]
        lines.append(f"| {' | '.join([*cells, *(str(found[key]) for key in ('rows', *REASONS, 'left', 'taken'))])} |")
    return "\n".join([*lines, "", *_compared(config, counts, known, vouched), *_further(config, counts)]) + "\n"


def _compared(config: DataStage, counts: dict[str, Any], known: Known, vouched: bool) -> list[str]:
    fate = DONE[config.data.decontaminate]
    if vouched:
        fate = "counted and kept, as data_root is a data run, which keeps its items apart"
    texts = ", ".join(f"{name} {count}" for name, count in known.texts.items()) or "none was found"
    shared = {name: counts[name]["shared"] for name in config.expert.sources if counts[name]["shared"]}
    told = [f"{name}: {', '.join(f'{of} {n}' for of, n in found.items())}" for name, found in shared.items()]
    return [
        f"Contaminated rows share {known.n} words in a row (twice as many characters where a script has no spaces) "
        f"with a benchmark, in any language. They are {fate}. Benchmark texts: {texts}; too short to compare: "
        f"{known.short}. Rows that share with each: {'; '.join(told) or 'none'}.",
        "",
        f"Word problems in language sets are {DONE[config.data.word_problems]}. Dropping either departs from the "
        "papers' letter.",
    ]


def _further(config: DataStage, counts: dict[str, Any]) -> list[str]:
    sources, lines = config.expert.sources, []
    if always := [f"{', '.join(source.without)} items of {name}" for name, source in sources.items() if source.without]:
        lines.append(f"Dropped in any case, as in the papers: {'; '.join(always)}.")
    if parts := [f"{name} {source.candidates}" for name, source in sources.items() if source.candidates]:
        lines.append(f"No more rows than this were looked at: {', '.join(parts)}.")
    if drawn := [f"{name} {counts[name]['sampled_from']}" for name in sources if counts[name].get("sampled_from")]:
        lines.append(f"Of these many rows a sample was drawn before they were looked at: {', '.join(drawn)}.")
    return [part for line in lines for part in ("", line)]


def summary(config: DataStage, counts: dict[str, Any]) -> str:
    """The same in a line, for the log."""
    sums = {key: sum(counts[name][key] for name in config.expert.sources) for key in ("rows", *REASONS)}
    told = ", ".join(f"{count} {key.replace('_', ' ')}" for key, count in sums.items())
    return f"data of {config.expert.name}: {counts['train']} rows taken of {told}; see data_card.md"
