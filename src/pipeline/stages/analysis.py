"""The builder of analyses: the experts, by number, and the base that all of them have."""

from __future__ import annotations

from pipeline.config.stages import AnalyzeStage
from pipeline.errors import PipelineError
from pipeline.runs.lineage import base_of, one_base
from pipeline.stages.resolver import Draft, Resolver, label_of


def build(config: AnalyzeStage, resolver: Resolver) -> Draft:
    if isinstance(config.checkpoint, list):
        references = config.checkpoint
    else:
        references = [config.checkpoint]
    if not references or not all(isinstance(reference, str) for reference in references):
        raise PipelineError(
            f"checkpoint={config.checkpoint} is not a RUN: give checkpoint=RUN, or"
            " checkpoint=[RUN,RUN]"
        )
    parents = {
        str(index): resolver.model(reference, "checkpoint")
        for index, reference in enumerate(references)
    }
    label = "analyze-" + "-".join(label_of(parent) for parent in parents.values())
    if config.base is not None:
        return config, label, {**parents, "base": resolver.model(config.base, "base")}
    bases = [
        (expert.name, base_of(expert, resolver.runs_dir, "checkpoint"))
        for expert in parents.values()
    ]
    return config, label, {**parents, "base": one_base(bases, "checkpoint: the experts")}
