"""Scores that were made before: one file for each (weights, task), found again by all that decides them, or not at all.

A file is named by the digest of its key and holds the key, which is compared in full. It is written at once when its
task is done, so that an evaluation that stops keeps what it has scored, and evaluations that share a task share it.
Beside it, generated answers are stored one by one (`Answers`), which tasks with other rows share.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks.task_files import Definition
from pipeline.config.harness_tasks import merge_includes
from pipeline.evaluate.records import TaskResult
from pipeline.files import sha256, write_atomically
from pipeline.hub.models import local_folder
from pipeline.merge.adapters import recorded_key, write_adapter
from pipeline.merge.digests import SourceDigests
from pipeline.merge.write import copy_files
from pipeline.models.checkpoint import digest_tensors, weights_root
from pipeline.models.files import ADAPTER_CONFIG, DECIDING
from pipeline.runs.lineage import base_folder
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Parent

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging

Key = dict[str, Any]


def model_key(checkpoint: Parent) -> Key:
    """What a model is: the root over its tensors, an adapter's base, and the files that decide how it answers.

    The root is the one that its run recorded, of a merge its key; of a folder that no run made, all tensors are read.
    """
    folder, base = checkpoint.folder, None
    manifest = read_manifest(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        model = manifest.parents.get("model") if manifest else None  # a merge has none
        base = (model.content or model.hash) if model else root_of(local_folder(base_folder(folder)))
    return {"root": root_of(folder), "base": base, "files": deciding_files(folder)}


def merge_key(merge: Merging, runs_dir: Path) -> Key:
    """The key of a merge in memory, which is that of the written merge: by what it is made of (merge/digests.py)."""
    with TemporaryDirectory() as folder:
        if merge.adapter:
            write_adapter(merge.adapter, Path(folder))
        copy_files(merge.giver, Path(folder), merge.dtype, bool(merge.adapter))
        base = root_of(merge.adapter.base.folder) if merge.adapter else None
        return {"root": SourceDigests(merge, runs_dir).key(), "base": base, "files": deciding_files(Path(folder))}


def root_of(folder: Path) -> str:
    """What was recorded when a model was written, of a merge its key, else the root over its tensors."""
    return recorded_key(folder) or weights_root(digest_tensors(folder))


def deciding_files(folder: Path) -> dict[str, str]:
    return {name: sha256(folder / name) for name in DECIDING if (folder / name).is_file()}


def task_key(definition: Definition, task: Any, rows: Sequence[int]) -> Key:
    """What is asked: the task's body without the places of anything, the exemplars and the questions themselves."""
    docs = [list(task.fewshot_docs()) if definition.num_fewshot else [], [task.eval_docs[row] for row in rows]]
    return {
        "name": definition.name,
        "body": _body(definition.file),
        "data": _digest(docs),
        "rows": [rows[0], rows[-1]] if len(rows) else [],
    }


def _body(file: Path) -> Key:
    """What a task file says, with those that it includes. Of functions the name alone (tasks.py): modules move."""
    body = merge_includes(file)
    body.pop("dataset_kwargs", None)
    return body


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def whole_key(model: Key, task: Key, settings: Key, stage_version: int) -> Key:
    """The key of one (weights, task): `settings` are the backend, the dtype and how prompts are made."""
    made_by = {"harness": version("lm_eval"), "ours": stage_version}
    return {"model": model, "task": task, "made_by": made_by, **settings}


@dataclass
class Kept:
    """The folder with the files, and the model whose scores are requested. `fresh`: find nothing, write again."""

    folder: Path
    model: Key
    version: int  # of the eval stage
    fresh: bool = False

    def look_up(self, key: Key) -> TaskResult | None:
        """What was scored under exactly this key. A file that is not whole counts as not there."""
        if self.fresh:
            return None
        try:
            content = json.loads(self.file(key).read_text(encoding="utf-8"))
            same = content["key"] == json.loads(json.dumps(key)) and content["digest"] == _digest(content["scored"])
            return TaskResult.from_json(content["scored"]) if same else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, key: Key, result: TaskResult) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        body = json.loads(json.dumps(result.as_json(), ensure_ascii=False))  # as it will be read
        text = json.dumps({"key": key, "digest": _digest(body), "scored": body}, ensure_ascii=False)
        write_atomically(self.file(key), text)

    def answers(self, task: str, settings: Key) -> Answers:
        """The answers of this model to prompts of a task, whatever its rows: a larger eval.limit reuses them."""
        key = whole_key(self.model, {"name": task}, settings, self.version)
        return Answers(self.file(key).with_suffix(".jsonl"), self.fresh)

    def file(self, key: Key) -> Path:
        return self.folder / f"{key['task']['name']}-{_digest(key)[:32]}.json"


class Answers:
    """Generated answers, stored one by one when they end, so that a killed evaluation resumes at the next question.

    Each line of the file is [digest of prompt and settings, answer, whether it ran out of tokens].
    """

    def __init__(self, file: Path, fresh: bool = False) -> None:
        self.file = file
        self.found = {} if fresh else _stored(file)

    def look_up(self, request: Sequence[Any]) -> tuple[str, bool] | None:
        """The answer to (prompt, settings), and whether it ran out of tokens."""
        return self.found.get(_digest(request))

    def keep(self, request: Sequence[Any], answer: str, ran_out: bool) -> None:
        key = _digest(request)
        if key in self.found:
            return
        self.found[key] = answer, ran_out
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:  # on a line of its own after one written in part
            file.write(f"\n{json.dumps([key, answer, ran_out])}\n")


def _stored(file: Path) -> dict[str, tuple[str, bool]]:
    """The lines of a file of answers that are whole. Those of earlier versions end with the answer's tokens."""
    found = {}
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                key, answer, ran_out, *_ = json.loads(line)
                found[str(key)] = answer, ran_out
    return found
