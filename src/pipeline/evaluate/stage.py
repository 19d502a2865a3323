"""The eval stage: one model put to the evaluation harness, a task in a language a run; of several,
their averages.

Scores are the harness' own; further ones are added to them (standard errors, a row a subject, the
share of answers that held no number or ran out of tokens). A prompt that does not fit is counted
and refused, where the harness would cut its beginning off with no more than a warning. Answers that
are stored are not computed again (store.py).
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.config.evaluation import Eval, settle_products
from pipeline.config.extensions import BACKENDS, outside_core
from pipeline.errors import PipelineError
from pipeline.evaluate import records
from pipeline.evaluate.before import OF_MODEL, OF_TASKS, check_all, define_tasks
from pipeline.evaluate.bundle import gather_scores, scoring_runs
from pipeline.evaluate.groups import join_group
from pipeline.evaluate.model import open_model
from pipeline.evaluate.prompts import harness_tamed, load_tasks
from pipeline.evaluate.score import score_tasks
from pipeline.evaluate.store import Store
from pipeline.evaluate.torch_backend import TorchBackend
from pipeline.evaluate.weights import scratch_folder, weights_of
from pipeline.hub.lock import read_lock
from pipeline.hub.models import local_folder
from pipeline.models.products import BF16X3
from pipeline.runs.dtypes import dtypes_in, one_dtype

if TYPE_CHECKING:
    from pipeline.config.stages import EvalStage
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker


def make(run: Run[EvalStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """Score the model of `run`: writes scores.json, samples/ and tasks/ into `work`, gives back the
    scores. A run of several tasks or languages has the scoring runs as parents, and gathers what
    they found.

    Raises PipelineError for missing or broken data, unknown tasks and languages, too many exemplars
    (all before any weights are read), and for prompts that are longer than the model takes.
    """
    scored = {}
    for role in scoring_runs(run.config):
        if role in run.parents:
            scored[role] = run.parents[role]
    if scored:
        facts = gather_scores(scored, work)
        tracker.summary(facts["scores"])
        return facts
    folder, run = run.folder.resolve(), in_its_dtype(run)
    settings: Eval = run.config.eval
    left_out: list[records.ScoreRow] = []
    specs = define_tasks(run, work / "tasks", left_out)
    for skipped in left_out:
        print(f"skipped: {skipped.task} in {skipped.language}: {skipped.reason}", file=sys.stderr)
    check_all([*OF_TASKS, *OF_MODEL], run, specs)
    if settings.products == BF16X3 and not torch.cuda.is_available():
        raise PipelineError(
            f"eval.products={BF16X3} is computed on a GPU, and none is visible: give"
            " eval.products=ieee"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            contextlib.redirect_stdout(sys.stderr)
        )  # the harness and its libraries print
        stack.enter_context(harness_tamed())
        tasks = load_tasks(specs, read_lock(run.runs_dir))
        scratch = stack.enter_context(scratch_folder(work / "merge"))
        weights = weights_of(run, scratch)
        store = Store(run.runs_dir / ".scores", weights.key, fresh=run.config.redo)
        lm = open_model(
            weights.of, settings.batch_size, settings.dtype, backend_of(settings, scratch)
        )
        stack.callback(lm.engine.close)
        result = score_tasks(lm, specs, tasks, settings, store)
        specs, result = join_group(specs, result)
    further_rows = records.further_rows_of(specs, result.samples, settings.spm_model)
    result = replace(result, beside=further_rows + left_out)
    scores = records.write_evaluation(result, specs, work)
    for file in (work / "tasks").glob("*.yaml"):  # their rows move with the finished run
        text = file.read_text(encoding="utf-8").replace(str(work.resolve()), str(folder))
        file.write_text(text, encoding="utf-8")
    facts = {"scores": scores, "harness": result.harness, "weights_root": weights.key["root"]}
    if weights.merge:
        facts["merge"] = weights.merge
    measured = weights.measure()
    tracker.summary(scores | measured)
    return facts | measured


def backend_of(settings: Eval, scratch: Path) -> Any:
    """Return what opens weights, by eval.backend.

    `scratch` is an empty folder for a merge that has to be written.
    """
    if settings.backend == "hf":
        return partial(TorchBackend, products=settings.products)
    return outside_core(BACKENDS, settings.backend).backend(settings, scratch)


def in_its_dtype(run: Run[EvalStage]) -> Run[EvalStage]:
    """Return the run with the dtype that it is scored in.

    If weights on the Hub were not known when it was built, it is that of their headers.

    Raises: PipelineError: weights are stored in another dtype than was planned for them.
    """
    config = run.config
    if config.eval.dtype != "auto" and not config.as_stored:
        return run
    model = run.parents[next(iter(config.merge.references())) if config.merge else "checkpoint"]
    stored = (config.merge and config.merge.result_dtype()) or one_dtype(
        dtypes_in(local_folder(model.folder)), model.name
    )
    if stored is None:
        return run  # no safetensors: refused when they are loaded
    if config.eval.dtype not in ("auto", stored):
        raise PipelineError(
            f"{run.label} was planned in {config.eval.dtype}, but its weights are stored as"
            f" {stored}: give eval.dtype={stored}, and the same to all that is compared with it"
        )
    return replace(
        run, config=replace(config, eval=settle_products(replace(config.eval, dtype=stored)))
    )
