"""The builder of evaluations: the model or merge that is scored, and the files that hold the questions."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.config.stages import EvalStage
from pipeline.data import benchmark_files
from pipeline.errors import PipelineError
from pipeline.files import content_hash, sha256
from pipeline.languages import language
from pipeline.runs.run import External
from pipeline.study.build.data import locked_benchmarks
from pipeline.study.build.merge import described
from pipeline.study.build.resolver import Draft, Resolver, label_of
from pipeline.study.build.world import refuse_another_world


def build(config: EvalStage, resolver: Resolver) -> Draft:
    for code in config.languages:
        if language(code).constructed and config.data_root is None:
            raise PipelineError(f"{code} is a constructed language and not on the hub: set data_root")
    if config.checkpoint is None:
        label, parents = described(config, resolver)
    else:
        parents = {"checkpoint": resolver.model(config.checkpoint, "checkpoint")}
        label = label_of(parents["checkpoint"])
    if config.data_root is not None:
        parents["data_root"] = resolver.data_root(config.data_root) or questions(config, Path(config.data_root))
        for model in [one for role, one in parents.items() if role != "data_root"]:
            refuse_another_world(model, parents["data_root"], config)
    else:
        parents |= locked_benchmarks(config)
    if config.eval.spm_model is not None:
        file = Path(config.eval.spm_model)
        if not file.is_file():
            raise PipelineError(
                f"eval.spm_model={file} is no file: give the SentencePiece model of spBLEU, or leave it out"
            )
        parents["spm_model"] = External(file.name, sha256(file), file)
    return config, f"eval-{config.eval.name}-{label}", parents


def questions(config: EvalStage, folder: Path) -> External:
    """A plain data_root, known by the files that this evaluation reads."""
    asked = [(task.task, language) for task in config.eval.tasks for language in {*config.languages, "en"}]
    places = [(re.sub("^mgsm_.*", "mgsm", task), language) for task, language in asked]
    files = {path for task, language in places for path in benchmark_files.files(folder, task, language)}
    return External(folder.name, content_hash(sorted(files), folder), folder)
