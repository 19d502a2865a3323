"""The eval stage: one model, some tasks, some languages, each put to the evaluation harness.

Scores are the harness' own; what is added stands beside them (standard errors, a row a subject, the share of answers
that held no number or ran out of tokens). A prompt that does not fit is counted and refused, where the harness would
cut its beginning off with no more than a warning. What was scored before is found again (store.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lm_eval import evaluate
from lm_eval.api import task as harness_task
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.utils import env as templates
from lm_eval.utils import hash_string

from pipeline.config import Eval
from pipeline.evaluate import metrics, scored, store
from pipeline.evaluate.answering import Answering
from pipeline.evaluate.definitions import task_definitions
from pipeline.evaluate.programs import check_confinement
from pipeline.evaluate.scored import Row, Scored, Scores
from pipeline.evaluate.shards import Helpers
from pipeline.evaluate.task_files import Definition
from pipeline.knobs import PipelineError

if TYPE_CHECKING:
    from pipeline.runs import Run
    from pipeline.tracking import Tracker


def make(run: Run, work: Path, tracker: Tracker) -> Row:
    """Score the model of `run`: writes scores.json, samples/ and tasks/ into `work`, gives back the scores.

    Raises PipelineError for missing or broken data, unknown tasks and languages, too many exemplars (all before any
    weights are read), and for prompts that are longer than the model takes.
    """
    stage: Any = run.config  # an EvalStage
    asked: Eval = stage.eval
    left_out: list[Row] = []
    definitions = defined(run, work / "tasks", left_out)
    refuse_early(run, definitions)
    with contextlib.redirect_stdout(sys.stderr), _harness_tamed():  # the harness and its libraries print
        tasks = load_tasks(definitions)
        kept = kept_scores(run)
        load = functools.partial(load_model, run, asked.batch_size, asked.dtype)
        scores = score(lambda: answering(run, load), definitions, tasks, asked, kept)
    spm_model = Path(asked.spm_model) if asked.spm_model else None
    scores.beside = scored.beside(definitions, scores.rows, scores.samples, spm_model)
    scores.beside += map(scored.missing_row, left_out)
    named = scored.write(scores, definitions, work)
    tracker.summary(named)
    return {"scores": named, "harness": scores.harness}


def defined(run: Run, folder: Path, left_out: list[Row]) -> list[Definition]:
    """The task files of what the stage asks for, their data checked; what a bundle cannot have goes into `left_out`."""
    stage: Any = run.config
    asked: Eval = stage.eval
    root = run.parents["data_root"].folder if "data_root" in run.parents else stage.data_root
    definitions = task_definitions(
        asked.tasks,
        stage.languages,
        Path(root) if root else None,
        folder,
        split=asked.split,
        max_gen_toks=asked.max_gen_toks,
        run_code=asked.run_code,
        options=asked.options,
        left_out=left_out,
    )
    for one in left_out:
        print(f"left out: {one['task']} in {one['language']}: {one['reason']}", file=sys.stderr)
    return definitions


def refuse_early(run: Run, definitions: Sequence[Definition]) -> None:
    """What would otherwise fail after minutes of loading or scoring."""
    asked: Eval = run.config.eval  # type: ignore[attr-defined]
    if any(definition.task == "mbpp" for definition in definitions):
        check_confinement()
    if asked.spm_model and not find_spec("sentencepiece"):
        raise PipelineError("eval.spm_model needs SentencePiece, which is not installed: pip install sentencepiece")
    if asked.backend == "vllm" and "checkpoint" not in run.parents:
        raise PipelineError("eval.backend=vllm reads a folder: make the merge with stage=merge, then checkpoint=RUN")
    if asked.backend == "vllm" and not find_spec("vllm"):
        raise PipelineError(
            "eval.backend=vllm needs vLLM, which is not installed: pip install vllm, or eval.backend=hf"
        )
    if "checkpoint" not in run.parents:
        return  # a merge's files are looked at with its headers
    checkpoint = run.parents["checkpoint"].folder
    known = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    if any(checkpoint.glob("*.safetensors")) and not any((checkpoint / name).is_file() for name in known):
        raise PipelineError(f"checkpoint {checkpoint} has no tokenizer: copy that of its base into the folder")


# ------------------------------------------------------------------------------------------------- the model


def answering(run: Run, load: Callable[[], Answering]) -> LM:
    """The model that answers: `load()`, with helpers on other GPUs where shards are asked for, or the harness' vLLM."""
    asked: Eval = run.config.eval  # type: ignore[attr-defined]
    if asked.backend == "vllm":
        return vllm_model(run.parents["checkpoint"].folder, asked)
    helpers = Helpers(load, asked.shards - 1) if asked.shards > 1 else None
    lm = load()
    if lm.tokenizer.eos_token_id is None:
        raise PipelineError(
            f"the tokenizer of {lm.tokenizer.name_or_path} has no eos_token, at which answers end: name one"
        )
    lm.helpers = helpers
    return lm


def vllm_model(checkpoint: Path, asked: Eval) -> LM:
    """The harness' own vLLM model of a folder. It shares prefixes by itself, and tells not which answers ran out."""
    from lm_eval.models.vllm_causallms import VLLM

    gpus = {"data_parallel_size": asked.shards} if asked.shards > 1 else {}
    return VLLM(pretrained=str(checkpoint), dtype=asked.dtype, batch_size="auto", enable_prefix_caching=True, **gpus)


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


# ------------------------------------------------------------------------------------------------- the tasks


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
            remedy = f"see {definition.file}"
            if definition.task == "flores" and "data_files" not in definition.file.read_text(encoding="utf-8"):
                remedy = (
                    "accept the conditions of FLORES+ on the hub and log in, or set data_root to a folder with flores/"
                )
            raise PipelineError(f"the data of {definition.name} cannot be read ({reason}): {remedy}") from error
        _refuse_too_many_shots(definition, tasks[-1])
    return tasks


def _refuse_too_many_shots(definition: Definition, task: Any) -> None:
    """What is checked of local files before, of the hub's."""
    if definition.num_fewshot:
        subjects = getattr(task, "exemplars", {"": list(task.fewshot_docs())})
        subject, fewest = min(((name, len(docs)) for name, docs in subjects.items()), key=lambda one: one[1])
        if fewest < definition.num_fewshot:
            raise PipelineError(
                f"{definition.name}: num_fewshot={definition.num_fewshot}, but there are {fewest} exemplars"
                + (f" of {subject}" if subject else "")
                + f": ask for at most {fewest}"
            )


# ------------------------------------------------------------------------------------------------- scoring


def kept_scores(run: Run) -> store.Kept | None:
    """Where scores of this model are kept from one evaluation to the next; a model without a checkpoint has no root."""
    if "checkpoint" not in run.parents:
        return None
    model = store.model_key(run.parents["checkpoint"])
    return store.Kept(run.runs_dir / ".scores", model, fresh=run.config.redo)


def score(
    load: Callable[[], LM],
    definitions: Sequence[Definition],
    tasks: Sequence[Task],
    asked: Eval,
    kept: store.Kept | None = None,
) -> Scores:
    """Put each task to the model of `load()` and gather the harness' scores; what is kept already is taken as it is.

    Raises PipelineError, with the count, if prompts do not fit; checked for all tasks before anything is scored.
    """
    settings = {"backend": asked.backend, "chat_template": asked.chat_template, "dtype": asked.dtype}
    put = list(zip(definitions, tasks, strict=True))
    chosen = {definition.name: _rows(definition, task, asked) for definition, task in put}
    keys: dict[str, store.Key] = {}
    found: dict[str, Scored] = {}
    if kept:
        for definition, task in put:
            asks = store.task_key(definition, task, chosen[definition.name])
            keys[definition.name] = store.whole_key(kept.model, asks, settings)
            again = kept.look_up(keys[definition.name])
            if again and again.too_long <= asked.too_long:
                found[definition.name] = again
                print(f"{definition.name}: found again, scored before on these weights", file=sys.stderr)
    found_again = list(found)
    left = [(definition, task) for definition, task in put if definition.name not in found]
    with _harness_tamed():
        lm = load() if left else None
        fitting = {d.name: _fitting(lm, d, task, chosen[d.name], asked) for d, task in left if lm}
        for definition, task in left:
            assert lm
            one = score_one(lm, definition, task, fitting[definition.name], asked)
            one.too_long = len(chosen[definition.name]) - len(fitting[definition.name])
            found[definition.name] = one
            _tell_of_endless_answers(definition, one, asked)
            if kept:
                kept.keep(keys[definition.name], one)
        if isinstance(lm, Answering) and lm.helpers:
            lm.helpers.close()
    packages = ("lm_eval", "transformers", "torch", "datasets", "sacrebleu")
    names = [definition.name for definition in definitions]
    harness = {
        "packages": {package: version(package) for package in packages},
        "versions": {name: found[name].version for name in names},
        "task_hashes": {name: found[name].task_hash for name in names},
        **settings,
        "share_prefix": asked.share_prefix,
        "found_again": found_again,
        "too_long": {name: found[name].too_long for name in names if found[name].too_long},
    }
    rows = [row for name in names for row in found[name].rows]
    return Scores(rows, {name: found[name].samples for name in names}, harness)


def _tell_of_endless_answers(definition: Definition, one: Scored, asked: Eval) -> None:
    cut_off = sum(bool(sample.get("cut_off")) for sample in one.samples)
    if cut_off > len(one.samples) / 2:
        print(
            f"{definition.name}: {cut_off} of {len(one.samples)} answers ran out of eval.max_gen_toks"
            f"{'' if asked.max_gen_toks is None else f'={asked.max_gen_toks}'} and were scored as they stood: "
            "the model does not stop, or needs more",
            file=sys.stderr,
        )


def _rows(definition: Definition, task: Task, asked: Eval) -> range:
    """The rows to score. A range, not a list: the harness asks `row in rows` for each row."""
    end = len(task.eval_docs)
    return range(definition.first, end if asked.limit is None else min(end, definition.first + asked.limit))


def score_one(lm: LM, definition: Definition, task: Task, rows: Sequence[int], asked: Eval) -> Scored:
    """One task put to a model: the inner half of the harness' simple_evaluate.

    The outer half reseeds the global generators and asks pip and git about the machine, which takes ten times as long
    as scoring a small task does.
    """
    if isinstance(lm, Answering):
        lm.share_prefix = asked.share_prefix and definition.num_fewshot > 0
    put: Any = {"tasks": {definition.name: task}}
    samples: Any = {definition.name: rows}
    how = {"apply_chat_template": asked.chat_template, "fewshot_as_multiturn": asked.chat_template}
    found = evaluate(lm=lm, task_dict=put, samples=samples, bootstrap_iters=0, log_samples=True, **how)
    records = found["samples"][definition.name]
    _, chief = metrics.PRIMARY[definition.task]
    ran_out = lm.ran_out if isinstance(lm, Answering) else {}
    kept = [scored.sample_of(definition, record, ran_out) for record in records if record["filter"] == chief]
    return Scored(
        rows=scored.rows_of(definition, found["results"][definition.name], records, kept),
        samples=kept,
        task_hash=hash_string(  # as the harness' command line makes it
            "".join(record["doc_hash"] + record["prompt_hash"] + record["target_hash"] for record in records)
        ),
        version=found["versions"].get(definition.name),
    )


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


def _fitting(lm: Any, definition: Definition, task: Task, rows: range, asked: Eval) -> Sequence[int]:
    """The rows whose prompts fit the model. Raises PipelineError where more than eval.too_long do not."""
    if not hasattr(lm, "max_length"):
        return rows
    how: dict[str, Any] = {}
    if asked.chat_template:
        if not getattr(lm.tokenizer, "chat_template", None):
            raise PipelineError("eval.chat_template=true, but the checkpoint's tokenizer has none: leave it off")
        how = {"apply_chat_template": True, "fewshot_as_multiturn": True}
        how |= {"chat_template": lm.apply_chat_template, "tokenizer_name": lm.tokenizer_name}
    task.build_all_requests(samples=rows, **how)  # type: ignore[arg-type]
    longest, too_long, room = 0, set(), lm.max_length
    put: dict[tuple[int, str], str] = {}  # a question's prompt -> the longest of what is asked after it
    for request in task.instances:
        prompt, after = request.args
        if request.request_type == "generate_until":
            room, after = lm.max_length - after.get("max_gen_toks", lm.max_gen_toks), ""
        put[request.doc_id, prompt] = max(put.get((request.doc_id, prompt), ""), after, key=len)
    for (doc_id, prompt), after in put.items():
        length = len(lm.tok_encode(prompt + after)) - bool(after)  # the last token is only predicted
        longest = max(longest, length)
        if length > room:
            too_long.add(rows[doc_id])
    if len(too_long) > asked.too_long or len(too_long) == len(rows):
        answer = f" less eval.max_gen_toks={lm.max_length - room} for the answer" if room < lm.max_length else ""
        raise PipelineError(
            f"{definition.name}: {len(too_long)} of {len(rows)} prompts do not fit, the longest of {longest} tokens in "
            f"the model's {lm.max_length}{answer}: ask for fewer exemplars" + (" or shorter answers" if answer else "")
        )
    if too_long:
        print(f"{definition.name}: {len(too_long)} prompts that do not fit leave the score", file=sys.stderr)
        return [row for row in rows if row not in too_long]
    return rows
