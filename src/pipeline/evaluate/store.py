"""Stored answers of models, by request: a stored answer is not computed again.

Files of runs_dir/.scores are named by a task and a digest. The digest covers everything that an
answer depends on besides the request: weights, files next to them, settings, and the harness. A
process appends to its own file and reads the files of all processes, so several processes can write
at once. An incomplete line, left by a killed process, is ignored.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

from pipeline.files import sha256
from pipeline.hub.models import local_folder
from pipeline.merge.adapters import root_of
from pipeline.merge.digests import known_digests, weights_key
from pipeline.merge.write import copy_files
from pipeline.merge.write_adapter import write_adapter
from pipeline.models.files import ADAPTER_CONFIG, DECIDING
from pipeline.runs.lineage import base_folder
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Parent

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging

Key = dict[str, Any]
VERSION = 8  # raise it when the code changes the answer to the same request


def model_key(checkpoint: Parent) -> Key:
    """Return the identity of a model.

    The identity has the root digest of the tensors, the base of an adapter, and the digests of the
    files that decide how the model answers. A run has recorded its root digest. For other folders
    all tensors are read.
    """
    folder = local_folder(checkpoint.folder)
    base: Any = None
    if (folder / ADAPTER_CONFIG).is_file():
        manifest = read_manifest(folder)
        model = None
        if manifest:
            model = manifest.parents.get("model")  # a merge has no such parent
        if model:
            base = model.content or model.hash
        else:
            base = base_key(local_folder(base_folder(folder)))
    return base_key(folder) | {"base": base}


def merge_key(merge: Merging, runs_dir: Path) -> Key:
    """Return the key of a merge in memory, equal to the written merge's (merge/digests.py)."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        base = None
        if merge.adapter:
            write_adapter(merge.adapter, folder)
            base = base_key(merge.adapter.base.folder)
        copy_files(merge.giver, folder, merge.dtype, bool(merge.adapter))
        root = weights_key(merge, known_digests(merge, runs_dir))
        return {"root": root, "base": base, "files": deciding_files(folder)}


def base_key(folder: Path) -> Key:
    """Return the identity of a folder with weights, such as an adapter's base.

    The folder may have no config.json (an adapter) and no tokenizer.
    """
    return {"root": root_of(folder), "files": deciding_files(folder)}


def deciding_files(folder: Path) -> dict[str, str]:
    return {name: sha256(folder / name) for name in DECIDING if (folder / name).is_file()}


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


@dataclass
class Answers:
    """Answers by request, which is (kind, *arguments) as in the harness.

    An answer is a generated text and whether it ran out of tokens, a log-likelihood and whether it
    is the greedy choice, or the log-likelihood of a whole text.

    Attributes:
        file: The file of new answers.
        together: Whether answers depend on each other. If so, they are written when all are
            computed, otherwise each at once.
        found: Answers by the digests of their requests.
    """

    file: Path
    together: bool
    found: dict[str, Any]

    def look_up(self, request: tuple[Any, ...]) -> Any:
        return self.found.get(digest(request))

    def add(self, key: str, answer: Any) -> bool:
        """Store an answer and return True, if its request has no answer yet."""
        if key in self.found:
            return False
        self.found[key] = answer
        if not self.together:
            self.write([(key, answer)])
        return True

    def write(self, answers: Iterable[tuple[str, Any]]) -> None:
        text = "".join(f"{json.dumps(answer)}\n" for answer in answers)
        self.lines.write(text)

    @cached_property
    def lines(self) -> TextIO:
        """The file, open while answers are added.

        On a shared disk, opening a file takes longer than writing a line.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        return self.file.open("a", encoding="utf-8", buffering=1)

    def close(self) -> None:
        """Close the file after the last answer."""
        if "lines" in vars(self):
            self.lines.close()


@dataclass
class Store:
    """The stored answers of one model in a folder. With `fresh`, stored answers are ignored."""

    folder: Path
    model: Key
    fresh: bool = False

    def answers(self, task: str, settings: Key, together: str | None) -> Answers:
        """Return the model's stored answers to requests of a task, whatever its rows.

        If an answer was computed twice, the later one counts.

        Args:
            task: The task's name.
            settings: The backend, the dtype and the other settings that decide an answer.
            together: The digest of all requests if an answer depends on those computed with it,
                otherwise None.
        """
        made_by = {"harness": version("lm_eval"), "ours": VERSION}
        key = {"model": self.model, "made_by": made_by, "together": together, **settings}
        name = f"{task}-{digest(key)[:32]}"
        stored: dict[str, Any] = {}
        if not self.fresh:
            files = list(self.folder.glob(f"{glob.escape(name)}.*.jsonl"))
            for file in sorted(files, key=lambda file: file.stat().st_mtime_ns):
                stored |= stored_answers(file)
        new_file = self.folder / f"{name}.{secrets.token_hex(4)}.jsonl"
        return Answers(new_file, together is not None, stored)


def stored_answers(file: Path) -> dict[str, Any]:
    """Read the complete lines of a file: [digest of a request, its answer]."""
    answers = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError):
            key, answer = json.loads(line)
            answers[str(key)] = answer
    return answers
