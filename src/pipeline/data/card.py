"""The data card of a training set: the sources of its rows, and the dropped rows with reasons."""

from __future__ import annotations

from typing import Any

from pipeline.config.stages import DataStage
from pipeline.data.benchmarks import Known, fate_of_number_variants
from pipeline.data.rows import UNUSABLE
from pipeline.hub.addresses import without_credentials
from pipeline.text import first_few, markdown_table

# reasons that are stated even if no row has them
ALWAYS = ("empty", "duplicates", "contaminated", "number_variants", "word_problems")
OUTCOME = {"drop": "dropped", "count": "counted and kept"}


def write_card(config: DataStage, counts: dict[str, Any], benchmarks: Known) -> str:
    """Return the data card in Markdown.

    Args:
        config: The configuration of the data run.
        counts: By source its rows, each reason, and the rows left and taken; then `train` and
            `validation`.
        benchmarks: The benchmarks that rows were compared with.
    """
    sources = config.expert.sources
    left_out = drop_reasons(config, counts)
    keys = ("rows", *left_out, "left", "taken")
    titles = [key.replace("_", " ") for key in keys]
    head = ("source", "hub id", "revision", "licence", "paper", *titles)
    rows, always = [], []
    for name, source in sources.items():
        address = without_credentials(source.hub or source.url or "local")
        numbers = [str(counts[name].get(key, 0)) for key in keys]
        revision = source.revision or "not pinned"
        rows.append([name, address, revision, source.licence, source.paper, *numbers])
        if source.without:
            always.append(f"{', '.join(source.without)} items of {name}")
    lines = [f"# Training set of expert {config.expert.name}", ""]
    lines += [f"{counts['train']} training rows, {counts['validation']} for validation.", ""]
    lines += [*markdown_table(head, rows), "", _comparison_text(config, counts, benchmarks)]
    if always:
        lines += ["", f"Dropped in any case, as in the papers: {'; '.join(always)}."]
    explained = []
    for key in UNUSABLE:
        if key in left_out:
            explained.append(f"{key.replace('_', ' ')} is {UNUSABLE[key]}")
    if explained:
        lines += ["", f"Of the rows that cannot be used, {'; '.join(explained)}."]
    return "\n".join(lines) + "\n"


def drop_reasons(config: DataStage, counts: dict[str, Any]) -> dict[str, str]:
    """Return the reasons for dropping rows, each as 'N reason'.

    They are the reasons that occurred and the reasons of ALWAYS.
    """
    reasons = {}
    for key in dict.fromkeys((*UNUSABLE, *ALWAYS)):
        count = sum(counts[name].get(key, 0) for name in config.expert.sources)
        if count or key in ALWAYS:
            reasons[key] = f"{count} {key.replace('_', ' ')}"
    return reasons


def _comparison_text(config: DataStage, counts: dict[str, Any], benchmarks: Known) -> str:
    fate = OUTCOME[config.data.decontaminate]
    by_fate: dict[str, list[str]] = {}
    shared = []
    for name, source in config.expert.sources.items():
        by_fate.setdefault(OUTCOME[fate_of_number_variants(config, source)], []).append(name)
        if counts[name]["shared"]:
            shared.append(f"{name}: {_count_lines(counts[name]['shared'])}")
    variants = []
    for outcome, names in by_fate.items():
        variants.append(f"{outcome} in {', '.join(names)}")
    texts = _count_lines(benchmarks.texts) or "none was found"
    if config.data.benchmarks == "none":
        texts = "none, by data.benchmarks=none"
    if benchmarks.unread:
        unread = ", ".join(first_few(benchmarks.unread, 5))
        texts += f"; not compared, as they could not be read: {unread}"
    paragraphs = [
        f"Contaminated rows share {benchmarks.n} words in a row (twice as many characters where a"
        f" script has no spaces) with a benchmark, in any language. They are {fate}. Benchmark"
        f" texts: {texts}; too short to compare: {benchmarks.short}. Rows that share with each:"
        f" {'; '.join(shared) or 'none'}.",
        "Number variants share as many words only with numbers removed from both. They are"
        f" {' and '.join(variants)}.",
        "Not detected: paraphrases, translations, and copies in which other words are changed,"
        " numbers in words among them, more often than that.",
        f"Word problems in language sets are {OUTCOME[config.data.word_problems]}. Dropping either"
        " departs from the papers' letter.",
    ]
    return "\n\n".join(paragraphs)


def _count_lines(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def summarize_counts(config: DataStage, counts: dict[str, Any]) -> str:
    """Return the counts in a line for the log."""
    sources = config.expert.sources
    rows = sum(counts[name]["rows"] for name in sources)
    parts = [f"{rows} rows", *drop_reasons(config, counts).values()]
    taken = f"data of {config.expert.name}: {counts['train']} rows taken"
    return f"{taken} of {', '.join(parts)}; see data_card.md"
