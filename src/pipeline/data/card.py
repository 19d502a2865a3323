"""The data card of a training set: what was taken and from where, what was dropped and why."""

from __future__ import annotations

from typing import Any

from pipeline.config.stages import DataStage
from pipeline.data.benchmarks import Known, fate_of_number_variants
from pipeline.data.rows import IN_PART, UNUSABLE
from pipeline.hub.addresses import without_credentials
from pipeline.text import first_few, markdown_table

# reasons that are stated where they are none, too
ALWAYS = ("empty", "duplicates", "contaminated", "number_variants", "word_problems")
OUTCOME = {"drop": "dropped", "count": "counted and kept"}


def write_card(config: DataStage, counts: dict[str, Any], benchmarks: Known) -> str:
    """Markdown. counts: of each source its rows, each reason, and what is left and taken; then
    train, validation.
    """
    sources = config.expert.sources
    left_out = drop_reasons(config, counts)
    keys = ("rows", *left_out, "short_copies", "left", "taken")
    head = (
        "source",
        "hub id",
        "revision",
        "licence",
        "paper",
        *(key.replace("_", " ") for key in keys),
    )
    rows = []
    for name, source in sources.items():
        address = without_credentials(source.hub or source.url or "local")
        cells = [name, address, source.revision or "not pinned", source.licence, source.paper]
        rows.append([*cells, *(str(counts[name].get(key, 0)) for key in keys)])
    lines = [
        f"# Training set of expert {config.expert.name}",
        "",
        f"{counts['train']} training rows, {counts['validation']} for validation.",
        "",
        *markdown_table(head, rows),
        "",
        *_comparison_lines(config, counts, benchmarks),
    ]
    always = []
    for name, source in sources.items():
        if source.without:
            always.append(f"{', '.join(source.without)} items of {name}")
    if always:
        lines += ["", f"Dropped in any case, as in the papers: {'; '.join(always)}."]
    explained = []
    for key in UNUSABLE:
        if key in left_out:
            explained.append(f"{key.replace('_', ' ')} is {UNUSABLE[key]}")
    if explained:
        lines += ["", f"Of the rows that cannot be used, {'; '.join(explained)}."]
    if "in_part" in left_out:
        lines += ["", f"Conversations in part are kept, and {IN_PART}."]
    return "\n".join(lines) + "\n"


def drop_reasons(config: DataStage, counts: dict[str, Any]) -> dict[str, str]:
    """Reasons for dropping rows, each as 'N reason': those that are always stated, and those that
    occurred.
    """
    keys = dict.fromkeys((*UNUSABLE, "in_part", *ALWAYS))
    sums = {key: sum(counts[name].get(key, 0) for name in config.expert.sources) for key in keys}
    found = {}
    for key, count in sums.items():
        if count or key in ALWAYS:
            found[key] = f"{count} {key.replace('_', ' ')}"
    return found


def _comparison_lines(config: DataStage, counts: dict[str, Any], benchmarks: Known) -> list[str]:
    fate = OUTCOME[config.data.decontaminate]
    by_fate: dict[str, list[str]] = {}
    for name, source in config.expert.sources.items():
        by_fate.setdefault(OUTCOME[fate_of_number_variants(config, source)], []).append(name)
    variants = " and ".join(
        f"{outcome} in {', '.join(names)}" for outcome, names in by_fate.items()
    )
    texts = _count_lines(benchmarks.texts) or "none was found"
    if config.data.benchmarks == "none":
        texts = "none, by data.benchmarks=none"
    if benchmarks.unread:
        texts += (
            "; not compared, as they could not be read:"
            f" {', '.join(first_few(benchmarks.unread, 5))}"
        )
    shared = {}
    for name in config.expert.sources:
        if counts[name]["shared"]:
            shared[name] = counts[name]["shared"]
    shared_texts = [
        f"{name}: {_count_lines(by_benchmark)}" for name, by_benchmark in shared.items()
    ]
    return [
        (
            f"Contaminated rows share {benchmarks.ngrams.n} words in a row (twice as many"
            " characters where a script has no spaces) with a benchmark, in any language. They are"
            f" {fate}. Benchmark texts: {texts}; too short to compare:"
            f" {len(benchmarks.ngrams.short)}. Rows that share with each:"
            f" {'; '.join(shared_texts) or 'none'}."
        ),
        "",
        (
            "Short copies have a line that is one of the texts that are too short to compare. They"
            " are kept."
        ),
        "",
        (
            "Number variants share as many words only with numbers removed from both. They are"
            f" {variants}."
        ),
        "",
        (
            "Not detected: paraphrases, translations, and copies in which other words are changed,"
            " numbers in words among them, more often than that."
        ),
        "",
        (
            f"Word problems in language sets are {OUTCOME[config.data.word_problems]}. Dropping"
            " either departs from the papers' letter."
        ),
    ]


def _count_lines(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def summarize_counts(config: DataStage, counts: dict[str, Any]) -> str:
    """Return the counts in a line, for the log."""
    rows = sum(counts[name]["rows"] for name in config.expert.sources)
    parts = ", ".join([f"{rows} rows", *drop_reasons(config, counts).values()])
    copies = sum(counts[name]["short_copies"] for name in config.expert.sources)
    kept = ""
    if copies:
        kept = f", {copies} kept that hold a short text of a benchmark"
    return (
        f"data of {config.expert.name}: {counts['train']} rows taken of {parts}{kept}; see"
        " data_card.md"
    )
