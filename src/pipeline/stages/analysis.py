"""The builder of analyses: the numbered experts, and their common base."""

from __future__ import annotations

from pipeline.config.stages import AnalyzeStage
from pipeline.errors import PipelineError
from pipeline.runs.lineage import base_of, one_base
from pipeline.stages.resolver import Draft, Resolver, label_of


def build(config: AnalyzeStage, resolver: Resolver) -> Draft:
    references = config.checkpoint
    if not isinstance(references, list):
        references = [references]
    if not references or not all(isinstance(reference, str) for reference in references):
        raise PipelineError(
            f"checkpoint={config.checkpoint} is not a RUN. Set checkpoint=RUN, or"
            " checkpoint=[RUN,RUN]."
        )
    experts = [resolver.model(reference, "checkpoint") for reference in references]
    parents = {str(index): expert for index, expert in enumerate(experts)}
    label = "analyze-" + "-".join(map(label_of, experts))
    if config.base is not None:
        return config, label, {**parents, "base": resolver.model(config.base, "base")}
    bases = [(expert.name, base_of(expert, resolver.runs_dir, "checkpoint")) for expert in experts]
    return config, label, {**parents, "base": one_base(bases, "checkpoint: the experts")}
