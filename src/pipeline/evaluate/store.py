"""Answers that models gave before, by request: what is stored is not computed again, whoever asks
for it.

Files of runs_dir/.scores are named by a task and by the digest of all that decides an answer
besides the request: the weights, the files beside them, the settings, the harness. A process
appends to a file of its own and reads those of all, so that several write at once; a line that a
kill cut off is not read.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

from pipeline.files import sha256
from pipeline.hub.models import local_folder
from pipeline.merge.adapters import root_of, write_adapter
from pipeline.merge.digests import known_digests, weights_key
from pipeline.merge.write import copy_files
from pipeline.models.files import ADAPTER_CONFIG, DECIDING
from pipeline.runs.lineage import base_folder
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Parent

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging

Key = dict[str, Any]
VERSION = 8  # raised when the code changes the answer to the same request


def model_key(checkpoint: Parent) -> Key:
    """Return what a model is: the root over its tensors, an adapter's base, and the files that
    decide how it answers.

    A run recorded its root, a merge has its key. Of a folder that no run made, all tensors are
    read.
    """
    folder, base = local_folder(checkpoint.folder), None
    manifest = read_manifest(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        # a merge has none
        model = None
        if manifest:
            model = manifest.parents.get("model")
        base = (
            (model.content or model.hash) if model else base_key(local_folder(base_folder(folder)))
        )
    return base_key(folder) | {"base": base}


def merge_key(merge: Merging, runs_dir: Path) -> Key:
    """Return the key of a merge in memory, which is that of the written merge
    (merge/digests.py).
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        if merge.adapter:
            write_adapter(merge.adapter, folder)
        copy_files(merge.giver, folder, merge.dtype, bool(merge.adapter))
        base = base_key(merge.adapter.base.folder) if merge.adapter else None
        root = weights_key(merge, known_digests(merge, runs_dir))
        return {"root": root, "base": base, "files": deciding_files(folder)}


def base_key(folder: Path) -> Key:
    """Return what the base of an adapter is: the adapter's folder has no config.json, and may have
    no tokenizer.
    """
    return {"root": root_of(folder), "files": deciding_files(folder)}


def deciding_files(folder: Path) -> dict[str, str]:
    found = {}
    for name in DECIDING:
        if (folder / name).is_file():
            found[name] = sha256(folder / name)
    return found


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


@dataclass
class Answers:
    """Answers by request, (kind, *arguments) as the harness has them: a generated text and whether
    it ran out of tokens, or a log-likelihood and whether it is the greedy choice, or the one of a
    whole text.

    file: takes those that are added, each at once, or where they depend on each other (`together`)
        when all are there.
    wanted: the digests of requests whose answers are taken.
    """

    file: Path
    together: bool
    found: dict[str, Any]
    wanted: set[str] = field(default_factory=set)

    def look_up(self, request: tuple[Any, ...]) -> Any:
        return self.found.get(digest(request))

    def add(self, key: str, answer: Any) -> bool:
        """Whether the answer to the request of this digest is wanted, of several the first."""
        if key not in self.wanted:
            return False
        self.wanted.remove(key)
        self.found[key] = answer
        if not self.together:
            self.write([(key, answer)])
        return True

    def write(self, answers: Iterable[tuple[str, Any]]) -> None:
        self.lines.write("".join(f"{json.dumps(answer)}\n" for answer in answers))

    @cached_property
    def lines(self) -> TextIO:
        """The file, open while answers are added: on a shared disk to open it takes longer than to
        write a line.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        return self.file.open("a", encoding="utf-8", buffering=1)

    def close(self) -> None:
        """After the last answer is added."""
        if "lines" in vars(self):
            self.lines.close()


@dataclass
class Store:
    """The folder with the files, and the model whose answers are requested.

    `fresh`: find nothing, write again.
    """

    folder: Path
    model: Key
    fresh: bool = False

    def answers(self, task: str, settings: Key, together: str | None) -> Answers:
        """Return what the model answered to requests of a task, whatever its rows.

        Args: settings: the backend, the dtype and what else decides an answer. together: if it
        depends on those computed with it, the digest of all requests.
        """
        made_by = {"harness": version("lm_eval"), "ours": VERSION}
        key = {"model": self.model, "made_by": made_by, "together": together, **settings}
        name = f"{task}-{digest(key)[:32]}"
        stored: dict[str, Any] = {}
        files = [] if self.fresh else self.folder.glob(f"{glob.escape(name)}.*.jsonl")
        for file in sorted(
            files, key=lambda file: file.stat().st_mtime_ns
        ):  # of an answer that was computed again,
            stored |= stored_answers(file)  # the later one
        return Answers(
            self.folder / f"{name}.{secrets.token_hex(4)}.jsonl", together is not None, stored
        )


def stored_answers(file: Path) -> dict[str, Any]:
    """Return the lines of a file that are whole: [digest of a request, its answer]."""
    answers = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError):
            key, answer = json.loads(line)
            answers[str(key)] = answer
    return answers
