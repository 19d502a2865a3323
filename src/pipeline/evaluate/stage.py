"""Stage eval: scores one model with the evaluation harness, one task in one language per run.

A run of several tasks or languages averages its scoring runs. Scores are the harness' own, with
additions: standard errors, a row per subject, the share of answers without a number, and the share
that ran out of tokens. If prompts do not fit, the evaluation fails; the harness would truncate
their beginning with a warning. Stored answers are not computed again (store.py).
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
from pipeline.evaluate.before import check_base, check_inputs, define_tasks, refuse_model
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
    """Score the model of `run` and return its scores.

    Writes scores.json, samples/ and tasks/ into `work`. A run of several tasks or languages has the
    scoring runs as parents and joins their results.

    Raises:
        PipelineError: Data is missing or broken, a task or language is unknown, there are too few
            exemplars (all checked before weights are read), or prompts do not fit the model.
    """
    roles = scoring_runs(run.config)
    scored = {role: run.parents[role] for role in roles if role in run.parents}
    if scored:
        facts = gather_scores(scored, work)
        tracker.summary(facts["scores"])
        return facts
    folder = run.folder.resolve()
    run = in_its_dtype(run)
    settings: Eval = run.config.eval
    left_out: list[records.ScoreRow] = []
    specs = define_tasks(run, work / "tasks", left_out)
    for skipped in left_out:
        print(f"skipped: {skipped.task} in {skipped.language}: {skipped.reason}", file=sys.stderr)
    check_inputs(settings, specs)
    check_base(run)
    if "checkpoint" in run.parents:  # a merge's files are checked with its headers
        refuse_model(run.parents["checkpoint"].folder)
    if settings.products == BF16X3 and not torch.cuda.is_available():
        raise PipelineError(
            f"eval.products={BF16X3} needs a GPU, and no GPU is visible. Set eval.products=ieee."
        )
    with contextlib.ExitStack() as stack:
        # the harness and its libraries print
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(harness_tamed())
        tasks = load_tasks(specs, read_lock(run.runs_dir))
        scratch = stack.enter_context(scratch_folder(work / "merge"))
        weights = weights_of(run, scratch)
        store = Store(run.runs_dir / ".scores", weights.key, fresh=run.config.redo)
        backend = backend_of(settings, scratch)
        lm = open_model(weights.of, settings.batch_size, settings.dtype, backend)
        stack.callback(lm.engine.close)
        result = score_tasks(lm, specs, tasks, settings, store)
        specs, result = join_group(specs, result)
    further_rows = records.further_rows_of(specs, result.samples, settings.spm_model)
    result = replace(result, beside=further_rows + left_out)
    scores = records.write_evaluation(result, specs, work)
    for file in (work / "tasks").glob("*.yaml"):
        # task files name the paths of their rows, which move with the finished run
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(str(work.resolve()), str(folder)), encoding="utf-8")
    facts = {"scores": scores, "harness": result.harness, "weights_root": weights.key["root"]}
    if weights.merge:
        facts["merge"] = weights.merge
    measured = weights.measure()
    tracker.summary(scores | measured)
    return facts | measured


def backend_of(settings: Eval, scratch: Path) -> Any:
    """Return the backend's class for eval.backend, with its settings.

    `scratch` is an empty folder for a merge that has to be written.
    """
    if settings.backend == "hf":
        return partial(TorchBackend, products=settings.products)
    return outside_core(BACKENDS, settings.backend).backend(settings, scratch)


def in_its_dtype(run: Run[EvalStage]) -> Run[EvalStage]:
    """Return the run with the dtype that it is scored in.

    If the weights are on the Hub and were unknown when the run was built, their headers decide.

    Raises:
        PipelineError: The weights are stored in another dtype than was planned.
    """
    config = run.config
    if config.eval.dtype != "auto" and not config.as_stored:
        return run
    role = "checkpoint"
    stored = None
    if config.merge:
        role = next(iter(config.merge.references()))
        stored = config.merge.result_dtype()
    if not stored:
        model = run.parents[role]
        stored = one_dtype(dtypes_in(local_folder(model.folder)), model.name)
    if stored is None:
        return run  # no safetensors: loading the weights fails
    if config.eval.dtype not in ("auto", stored):
        raise PipelineError(
            f"{run.label} was planned in {config.eval.dtype}, but its weights are stored as"
            f" {stored}. Set eval.dtype={stored} for it and for all runs that are compared with it."
        )
    settings = settle_products(replace(config.eval, dtype=stored))
    return replace(run, config=replace(config, eval=settings))
