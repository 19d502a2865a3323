"""The eval stage: one model, some tasks, some languages, one call of the evaluation harness.

Scores are the harness' own; what is added stands beside them (standard errors, a row a subject, the share of answers
that held no number or ran out of tokens). A prompt that does not fit is refused, where the harness would cut its
beginning off with no more than a warning.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lm_eval import evaluate
from lm_eval.api import task as harness_task
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import env as templates
from lm_eval.utils import hash_string

from pipeline.evaluate import metrics
from pipeline.evaluate.definitions import Definition, task_definitions
from pipeline.knobs import PipelineError

if TYPE_CHECKING:
    from pipeline.runs import Run
    from pipeline.tracking import Tracker

Row = dict[str, Any]


@dataclass
class Scores:
    """`rows` as in scores.json, `samples` a list of records for each definition's name, `harness` what scored them."""

    rows: list[Row]
    samples: dict[str, list[Row]]
    harness: Row


def make(run: Run, work: Path, tracker: Tracker) -> Row:
    """Score `run.parents["checkpoint"]`: writes scores.json, samples/ and tasks/ into `work`, gives back the scores.

    Raises PipelineError for missing or broken data, unknown tasks and languages, too many exemplars (all before any
    weights are read), and for prompts that are longer than the model takes.
    """
    stage: Any = run.config  # an EvalStage
    asked = stage.eval
    root = run.parents["data_root"].folder if "data_root" in run.parents else stage.data_root
    definitions = task_definitions(
        asked.tasks,
        stage.languages,
        Path(root) if root else None,
        work / "tasks",
        split=asked.split,
        max_gen_toks=asked.max_gen_toks,
    )
    with contextlib.redirect_stdout(sys.stderr), _harness_tamed():  # the harness and its libraries print
        tasks = load_tasks(definitions)
        lm = load_model(run, asked.batch_size, asked.dtype)
        scores = score(lm, definitions, tasks, asked.limit)
    return write(scores, definitions, work, tracker)


def load_model(what: Run | Path, batch_size: int, dtype: str = "auto") -> Answering:
    """The model of a run's checkpoint or merge, or of a folder: safetensors, no code of its own, in the dtype as stored
    unless told otherwise. A merge, and an adapter with its base, are put together in memory (merge/live.py).
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipeline.merge.adapters import is_adapter
    from pipeline.merge.engine import merge_of
    from pipeline.merge.live import alone, model_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    safe = {"local_files_only": True, "trust_remote_code": False}
    merge, folder = None, what
    if not isinstance(folder, Path):
        merge = None if "checkpoint" in folder.parents else merge_of(folder)
        folder = folder.parents["checkpoint"].folder if merge is None else merge.layout.folder
    if merge is None and is_adapter(folder):
        merge = alone(folder)
    try:
        if merge is not None:
            live = model_of(merge, dtype, device)
            return Answering(pretrained=live.model, tokenizer=live.tokenizer, batch_size=batch_size)
        tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, **safe)
    except PipelineError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PipelineError(
            f"checkpoint {folder} cannot be loaded ({reason}): it needs safetensors and a tokenizer"
        ) from error
    return Answering(pretrained=model.to(device), tokenizer=tokenizer, batch_size=batch_size)


class Answering(HFLM):
    """The harness' model, which also remembers which answers ended because max_gen_toks ran out."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ran_out: dict[tuple[str, str], bool] = {}  # by prompt and generation settings
        self._batch: list[bool] = []
        self.set_cache_hook(self)  # the harness tells its cache each answer, in the order of the batch

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        rows = super()._model_generate(context, max_length, stop, **kwargs)
        start = context.shape[1]
        self._batch = [
            metrics.ran_out(tokens, self.tok_decode(tokens), max_length - start, stop, self.eot_token_id)
            for tokens in (row[start:].tolist() for row in rows)
        ]
        return rows

    def add_partial(self, attr: str, request: Any, response: Any) -> None:
        if attr == "generate_until":
            self.ran_out[_key(request)] = self._batch.pop(0)


def _key(request: Sequence[Any]) -> tuple[str, str]:
    return request[0], json.dumps(request[1], sort_keys=True)


def load_tasks(definitions: Sequence[Definition]) -> list[Task]:
    """The harness' task objects, their data read, in the order of `definitions`."""
    manager = TaskManager(include_defaults=False)
    tasks = []
    for definition in definitions:
        try:
            with _harness_tamed():
                tasks += manager.load([str(definition.file)])["tasks"].values()
        except Exception as error:  # datasets raises whatever its readers and the network raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise PipelineError(
                f"the data of {definition.name} cannot be read ({reason}): see {definition.file}"
            ) from error
    return tasks


def score(lm: LM, definitions: Sequence[Definition], tasks: Sequence[Task], limit: int | None = None) -> Scores:
    """Put each task to a model and gather the harness' scores. `limit`: at most this many questions a task.

    Raises PipelineError, with the count, if prompts do not fit; checked for an `Answering` before anything is scored.
    """
    chosen = {}  # ranges, not lists: the harness asks `row in rows` for each row
    for definition, task in zip(definitions, tasks, strict=True):
        end = len(task.eval_docs)
        chosen[definition.name] = range(definition.first, end if limit is None else min(end, definition.first + limit))
    # The inner half of simple_evaluate. The outer half reseeds the global generators and asks pip and git about the
    # machine, which takes ten times as long as scoring a small task does.
    asked: Any = {"tasks": {definition.name: task for definition, task in zip(definitions, tasks, strict=True)}}
    with _harness_tamed():
        if isinstance(lm, Answering):
            for definition, task in zip(definitions, tasks, strict=True):
                _refuse_long_prompts(lm, definition, task, chosen[definition.name])
        found = evaluate(lm=lm, task_dict=asked, samples=chosen, bootstrap_iters=0, log_samples=True)
    rows, samples, hashes = [], {}, {}
    for definition in definitions:
        records = found["samples"][definition.name]
        hashes[definition.name] = hash_string(  # as the harness' command line makes it
            "".join(record["doc_hash"] + record["prompt_hash"] + record["target_hash"] for record in records)
        )
        _, chief = metrics.PRIMARY[definition.task]
        samples[definition.name] = [_sample(definition, lm, record) for record in records if record["filter"] == chief]
        rows += _rows(definition, found["results"][definition.name], records, samples[definition.name])
    packages = ("lm_eval", "transformers", "torch", "datasets", "sacrebleu")
    harness = {
        "packages": {package: version(package) for package in packages},
        "versions": {name: found["versions"].get(name) for name in hashes},
        "task_hashes": hashes,
    }
    return Scores(rows, samples, harness)


@contextlib.contextmanager
def _harness_tamed() -> Iterator[None]:
    """Habits of the harness: each look at a task's name draws from Python's random numbers; a prompt's template is
    compiled anew for each exemplar of each question, a millisecond each time; a bar for each task's prompts, done in no
    time, and warnings that a model in memory is no name of one.
    """
    state, compile_template = random.getstate(), templates.from_string
    logger = logging.getLogger("lm_eval")
    bar, level = harness_task.tqdm, logger.level
    templates.from_string = functools.cache(compile_template)
    harness_task.tqdm = functools.partial(bar, disable=True)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        harness_task.tqdm = bar
        templates.from_string = compile_template
        random.setstate(state)


def _refuse_long_prompts(lm: Answering, definition: Definition, task: Task, rows: range) -> None:
    task.build_all_requests(samples=rows)
    longest, too_long, room = 0, set(), lm.max_length
    for request in task.instances:
        if request.request_type == "generate_until":
            prompt, settings = request.args
            length, room = (
                len(lm.tok_encode(prompt)),
                lm.max_length - settings.get("max_gen_toks", lm.max_gen_toks),
            )
        else:
            length = len(lm.tok_encode("".join(request.args))) - 1  # the last token is only predicted
        longest = max(longest, length)
        if length > room:
            too_long.add(request.doc_id)
    if too_long:
        answer = f" less eval.max_gen_toks={lm.max_length - room} for the answer" if room < lm.max_length else ""
        raise PipelineError(
            f"{definition.name}: {len(too_long)} of {len(rows)} prompts do not fit, the longest of {longest} tokens in "
            f"the model's {lm.max_length}{answer}: ask for fewer exemplars" + (" or shorter answers" if answer else "")
        )


def _rows(definition: Definition, results: Row, records: list[Row], samples: list[Row]) -> list[Row]:
    """The score rows of one task: the harness' metrics, then ours."""

    def row(metric: str, chosen: str, value: float, each: Sequence[Any], subject: str | None = None) -> Row:
        single = all(isinstance(one, int | float) for one in each)  # not so for corpus scores
        return {
            **{
                "task": definition.task,
                "language": definition.language,
                "pair": definition.pair,
                "subject": subject,
            },
            **{
                "num_fewshot": definition.num_fewshot,
                "metric": metric,
                "filter": chosen,
                "value": float(value),
            },
            **{"stderr": metrics.mean_stderr(each) if single else None, "n": len(each)},
        }

    primary = metrics.PRIMARY[definition.task]
    found = []
    for key, value in results.items():
        metric, _, chosen = key.partition(",")
        if chosen and not metric.endswith("_stderr"):
            each = [record[metric] for record in records if record["filter"] == chosen]
            found.append(row(metric, chosen, value, each))
    found.sort(key=lambda one: (one["metric"], one["filter"]) != primary)
    if definition.task == "mgsm":
        lost = [metrics.is_unparsed(sample["extracted"]) for sample in samples]
        found.append(row("unparsed", primary[1], metrics.mean(lost), lost))
    cut_off = [sample["cut_off"] for sample in samples if "cut_off" in sample]
    if cut_off:
        found.append(row("cut_off", primary[1], metrics.mean(cut_off), cut_off))
    if definition.task == "global_mmlu":
        for subject in sorted({sample["subject"] for sample in samples}):
            each = [sample["scores"]["acc"] for sample in samples if sample["subject"] == subject]
            found.append(row("acc", "none", metrics.mean(each), each, subject))
    return found


def _sample(definition: Definition, lm: LM, record: Row) -> Row:
    """One question as it is kept: what was asked, what came back, what was read from it, whether it is right."""
    request, answer = record["arguments"][0], record["filtered_resps"]
    sample: Row = {"doc_id": record["doc_id"], "prompt": request[0]}
    scores = {name: record[name] for name in record["metrics"]}
    if definition.task in ("belebele", "global_mmlu"):
        letters = [continuation.strip() for _, continuation in record["arguments"]]
        likelihoods = [float(likelihood) for likelihood, _ in answer]
        best = letters[likelihoods.index(max(likelihoods))]
        target = record["target"]
        sample |= {
            "target": letters[target] if isinstance(target, int) else target,
            "response": best,
            "extracted": best,
        }
        sample |= {
            "correct": bool(scores["acc"]),
            "loglikelihoods": dict(zip(letters, likelihoods, strict=True)),
        }
        if definition.task == "global_mmlu":
            sample["subject"] = record["doc"]["subject"]
    else:
        sample |= {"target": str(record["target"]), "response": record["resps"][0][0], "extracted": answer[0]}
        if definition.task == "mgsm":
            sample["correct"] = bool(scores["exact_match"])
        else:
            sample |= {"extracted": answer[0].strip(), "correct": None}
            scores = {"chrf++": metrics.sentence_chrf(record["target"], answer[0])}
        if isinstance(lm, Answering):
            sample["cut_off"] = lm.ran_out[_key(request)]
    return sample | {"filter": record["filter"], "prompt_hash": record["prompt_hash"], "scores": scores}


def write(scores: Scores, definitions: Sequence[Definition], work: Path, tracker: Tracker) -> Row:
    """scores.json and samples/<task>.<language or pair>.jsonl; gives back the primary scores for the manifest."""
    (work / "samples").mkdir(parents=True, exist_ok=True)
    for definition in definitions:
        lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in scores.samples[definition.name])
        file = work / "samples" / f"{definition.task}.{definition.pair or definition.language}.jsonl"
        file.write_text("".join(lines), encoding="utf-8")
    report = {"rows": scores.rows, "harness": scores.harness}
    (work / "scores.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    named = {}
    for row in scores.rows:
        parts = (row["task"], row["pair"] or row["language"], row["subject"], row["metric"])
        name = "/".join(part for part in parts if part)
        named[name if row["filter"] in ("none", metrics.PRIMARY[row["task"]][1]) else f"{name},{row['filter']}"] = row[
            "value"
        ]
    tracker.summary(named)
    return {"scores": named, "harness": scores.harness}
