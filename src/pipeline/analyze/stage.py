"""The analyze stage: what training changed, parameter by parameter."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.analyze.changes import (
    Agreement,
    Change,
    agreement_facts,
    agreement_of,
    row_key,
    tensor_changes,
)
from pipeline.errors import PipelineError
from pipeline.merge.adapters import Source, open_source
from pipeline.merge.compatibility import check_sources
from pipeline.merge.formulas import by_size
from pipeline.models.anatomy import anatomy
from pipeline.models.arrays import in_threads
from pipeline.progress import Bar
from pipeline.runs.manifest import read_manifest

if TYPE_CHECKING:
    from pipeline.config.merging import Analyze
    from pipeline.config.stages import AnalyzeStage
    from pipeline.runs.run import Parent, Run
    from pipeline.runs.tracking import Tracker


def make(run: Run[AnalyzeStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """Write delta.csv and map.svg, the share of rows above each threshold as the paper's figures
    show it.

    Returns the facts of each expert, and of several experts how their changes agree.
    """
    from pipeline.analyze.heatmaps import map_of, svg_of_maps

    config, of_base = run.config, run.parents["base"].folder
    parents = {role: parent for role, parent in run.parents.items() if role != "base"}
    base, experts = (
        open_source(of_base),
        {role: open_source(run.folder, of_base) for role, run in parents.items()},
    )
    facts = {
        role: expert_facts(parent, experts[role], config.analyze)
        for role, parent in parents.items()
    }
    if not config.analyze.compare_unlike:
        refuse_unlike(facts)
    for (
        role,
        expert,
    ) in experts.items():  # dtypes may differ between them, which the flag above allows
        check_sources(
            {role: expert, "base": base},
            lambda role: "base" if role == "base" else f"checkpoint[{role}]",
        )

    labels = [fact["name"] for fact in facts.values()]
    names, limits = by_size(base), [fact["threshold"] for fact in facts.values()]
    with Bar("changes", sum(base.info(name).nbytes for name in names), "byte") as bar:

        def measure(name: str) -> list[Change]:
            changes = tensor_changes(
                list(experts.values()), base, name, limits, config.analyze.axis
            )
            bar.update(base.info(name).nbytes)
            return changes

        results = dict(zip(names, in_threads(measure, names, config.threads), strict=True))
    key_of_row = {name: row_key(name, site) for name, site in anatomy(base.names).items()}
    rows = [
        {"expert": label, **place, **vars(results[name][index])}
        for index, label in enumerate(labels)
        for name, place in key_of_row.items()
    ]
    write_csv(work / "delta.csv", rows)
    maps = [map_of(fact, rows) for fact in facts.values()]
    (work / "map.svg").write_text(svg_of_maps(maps, "delta", "share of rows"), encoding="utf-8")
    (work / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    agreement: dict[str, Any] = {}
    if len(experts) > 1:
        agreement = agreement_facts(
            compare_pairs(experts, labels, base, config.threads), anatomy(base.names)
        )
    return {"experts": facts, "axis": config.analyze.axis, **agreement}


def compare_pairs(
    experts: Mapping[str, Source], labels: Sequence[str], base: Source, threads: int | None
) -> dict[str, dict[str, Agreement]]:
    """Return the agreement of each parameter's changes for each pair of experts, by the pair's
    names.
    """
    names, pairs = by_size(base), {}
    for (first, second), of_pair in zip(
        itertools.combinations(experts.values(), 2), itertools.combinations(labels, 2), strict=True
    ):
        found = in_threads(partial(agreement_of, first, second, base), names, threads)
        pairs[" ".join(of_pair)] = dict(zip(names, found, strict=True))
    return pairs


def expert_facts(parent: Parent, expert: Source, knobs: Analyze) -> dict[str, Any]:
    """Facts for the label of an expert's map: its threshold, stored dtype and optimizer, from its
    manifest.
    """
    manifest = read_manifest(parent.folder)
    if (
        manifest and "choice" in manifest.facts
    ):  # a select run: the training of the snapshot that it chose
        training = manifest.facts["choice"]["checkpoint"].partition("@")[0]
        manifest = read_manifest(parent.folder.parent / training)
    config = manifest.config if manifest else {}
    side = (config.get("expert") or {}).get("side")
    published = {"math": knobs.threshold_math, "language": knobs.threshold_language}
    if knobs.threshold is None:
        threshold = published.get(str(side))
    else:
        threshold = knobs.threshold
    if threshold is None:
        raise PipelineError(
            f"{parent.name} has no side with a published threshold: give analyze.threshold=1e-5"
        )
    dtype = "+".join(sorted({info.dtype for info in expert.infos.values()}))
    optimizer = (config.get("sft") or {}).get("optimizer") or "unknown"
    return {
        "name": parent.name,
        "side": side,
        "threshold": threshold,
        "dtype": dtype,
        "optimizer": optimizer,
    }


def refuse_unlike(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise PipelineError unless experts share dtype and optimizer: rounding noise makes one scale
    misleading.
    """
    first, *further = facts.values()
    for expert, key in itertools.product(further, ("dtype", "optimizer")):
        if first[key] != expert[key]:
            raise PipelineError(
                f"{first['name']} has {key} {first[key]}, {expert['name']} has {expert[key]}: their"
                " maps are not comparable; analyze them apart, or give analyze.compare_unlike=true"
            )


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
