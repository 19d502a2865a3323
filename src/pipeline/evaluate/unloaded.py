"""The lengths of a task's prompts, by the tokenizer and the headers of a model whose weights are not read."""

from __future__ import annotations

import contextlib
import sys
from functools import lru_cache
from pathlib import Path

from pipeline.benchmarks.task_files import Definition
from pipeline.config.evaluation import Eval
from pipeline.errors import PipelineError, first_line
from pipeline.evaluate.model import Answering
from pipeline.evaluate.score import Lengths, harness_tamed, lengths_of, load_tasks, rows_asked, set_template_date
from pipeline.models.load import load_tokenizer
from pipeline.models.skeleton import build_skeleton


def measured(definition: Definition, folder: Path, settings: Eval) -> tuple[Lengths, int, int]:
    """(lengths of the prompts, questions, tokens that the model takes) of one task and the model in `folder`.

    Raises:
        PipelineError: its data cannot be read, or the model's files are not those of its config.json.
    """
    with contextlib.redirect_stdout(sys.stderr), harness_tamed():
        (task,) = load_tasks([definition])
        lm = model_without_weights(folder, settings.template_date if settings.chat_template else None)
        if settings.chat_template:
            set_template_date(lm, settings)
        rows = rows_asked(definition, task, settings)
        return lengths_of(lm, definition, task, rows, settings), len(rows), lm.max_length


@lru_cache(maxsize=1)
def model_without_weights(folder: Path, template_date: str | None) -> Answering:
    """A model for counting tokens. Cached, as tokenizers take seconds to load and the evaluations of a table share
    theirs; `template_date` keeps apart those whose chat template prints another date."""
    model = build_skeleton(folder, "checkpoint")
    try:
        tokenizer = load_tokenizer(folder)
    except PipelineError:
        raise
    except (OSError, ValueError) as error:
        raise PipelineError(f"the tokenizer of {folder} cannot be read ({first_line(error)})") from error
    return Answering(pretrained=model, tokenizer=tokenizer, batch_size=1)
