"""The data card of a training set: the sources of its rows, and the dropped rows with reasons."""

from __future__ import annotations

from typing import Any

from pipeline.config.stages import DataStage
from pipeline.data.benchmarks import Known
from pipeline.data.rows import UNUSABLE
from pipeline.errors import first_few
from pipeline.hub.addresses import without_credentials
from pipeline.text import markdown_table

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
    left_out = drop_reasons(config, counts)
    keys = ("rows", *left_out, "left", "taken")
    titles = [key.replace("_", " ") for key in keys]
    head = ("source", "hub id", "revision", "licence", "paper", *titles, "shared with")
    rows = []
    for name, source in config.expert.sources.items():
        address = without_credentials(source.hub or source.url or "local")
        revision = source.revision or "not pinned"
        numbers = [str(counts[name].get(key, 0)) for key in keys]
        shared = list_counts(counts[name]["shared"])
        rows.append([name, address, revision, source.licence, source.paper, *numbers, shared])
    texts = list_counts(benchmarks.texts) or "none was found"
    if config.data.benchmarks == "none":
        texts = "none, by data.benchmarks=none"
    if benchmarks.unread:
        unread = first_few(benchmarks.unread, 5)
        texts += f"; not compared, as they could not be read: {unread}"
    paragraphs = [
        f"# Training set of expert {config.expert.name}",
        f"{counts['train']} training rows, {counts['validation']} for validation.",
        "\n".join(markdown_table(head, rows)),
        f"Contaminated rows share {benchmarks.n} words in a row (twice as many characters where a"
        " script has no spaces) with a benchmark, in any language. They are"
        f" {OUTCOME[config.data.decontaminate]}. Number variants share as many words only with"
        f" numbers removed from both. Benchmark texts: {texts}; too short to compare:"
        f" {benchmarks.short}. Paraphrases and translations are not detected.",
        f"Word problems in language sets are {OUTCOME[config.data.word_problems]}.",
    ]
    for key in UNUSABLE:
        if key in left_out:
            paragraphs.append(f"Unusable rows, {key.replace('_', ' ')}: {UNUSABLE[key]}.")
    return "\n\n".join(paragraphs) + "\n"


def list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


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


def summarize_counts(config: DataStage, counts: dict[str, Any]) -> str:
    """Return the counts in a line for the log."""
    sources = config.expert.sources
    rows = sum(counts[name]["rows"] for name in sources)
    parts = [f"{rows} rows", *drop_reasons(config, counts).values()]
    taken = f"data of {config.expert.name}: {counts['train']} rows taken"
    return f"{taken} of {', '.join(parts)}; see data_card.md"
