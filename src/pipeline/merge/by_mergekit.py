"""A merge that mergekit computes in a process of its own, and its tensors read from what that wrote.

mergekit streams a tensor at a time to a temporary folder, in its own order, which decides the bits of random methods;
the merge is then written, or put into a model in memory, like any other.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pipeline.errors import PipelineError
from pipeline.merge import mergekit_engine
from pipeline.merge.adapters import Source
from pipeline.merge.formulas import as_they_are
from pipeline.models.checkpoint import DTYPES, Checkpoint
from pipeline.models.floats import buffers, matrix
from pipeline.runs.provenance import environment_for


class Result:
    """What mergekit makes of sources, by role; nothing before `compute`.

    The latest result of a process is kept: each evaluation of a merge in memory asks for it.
    """

    kept: ClassVar[dict[Any, tuple[tempfile.TemporaryDirectory[str], Checkpoint]]] = {}

    def __init__(self, config: Any, sources: Mapping[str, Source]) -> None:
        self.config, self.sources = config, sources
        self.checkpoint: Checkpoint | None = None

    def compute(self, threads: int | None) -> None:
        """Run mergekit. Raises PipelineError where it stops, or gives other tensors than the sources have."""
        decided = json.dumps([self.config.beyond_knobs(), self.config.seed, list(self.sources)])
        key = (decided, threads, as_they_are(*self.sources.values()))
        if key not in self.kept:
            self.kept.clear()
            folder = tempfile.TemporaryDirectory(prefix="mergekit-")
            self.kept[key] = folder, self._compute(Path(folder.name), threads)
        self.checkpoint = self.kept[key][1]

    def _compute(self, place: Path, threads: int | None) -> Checkpoint:
        size = max(sum(source.info(name).nbytes for name in source.names) for source in self.sources.values())
        if shutil.disk_usage(place).free < size:
            raise PipelineError(f"{place.parent} has no {size:,} bytes for mergekit's result: set TMPDIR elsewhere")
        links = {role: place / f"model_{role}" for role in self.sources}
        for role, link in links.items():  # a model may be there twice: as an expert and as the base in its place
            link.symlink_to(self.sources[role].folder.resolve(), target_is_directory=True)
        names = {model: str(links[role]) for model, role in self.config.roles().items() if role in links}
        asked = {
            "config": self.config.with_models(names), "out": str(place / "out"), "seed": self.config.seed,
            "threads": threads,
        }  # fmt: skip
        (place / "asked.json").write_text(json.dumps(asked))
        self._run(place / "asked.json")
        result = Checkpoint.open(place / "out")
        self._compare(next(iter(self.sources.values())), result)
        return result

    def _run(self, asked: Path) -> None:
        python, program = self.config.mergekit_python, Path(mergekit_engine.__file__).read_text(encoding="utf-8")
        executable = shutil.which(python) if python else sys.executable
        done = subprocess.run(  # as text and elsewhere: folders named mergekit, here and there, are not what it imports
            [os.path.abspath(executable or str(python)), "-c", program, str(asked)], env=environment_for(python),
            cwd=asked.parent, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            last = (done.stdout.strip().splitlines() or [""])[-1]
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            reason = json.loads(last)["error"] if last.startswith('{"error"') else lines[-1]
            raise PipelineError(f"merge.file={self.config.file}: mergekit stopped ({' '.join(reason.split())[:300]})")

    def _compare(self, layout: Source, result: Checkpoint) -> None:
        """Raise PipelineError where the result has other tensors than the first source, or another dtype than told."""
        dtype = self.config.result_dtype()
        for name in sorted({*layout.names, *result.names}):
            expected, got = (source.infos.get(name) for source in (layout, result))  # type: ignore[union-attr]
            told = DTYPES[dtype] if dtype else expected and expected.dtype
            if expected is None or got is None or (got.shape, got.dtype) != (expected.shape, told):
                found = f"{got.dtype} {got.shape}" if got else "absent"
                want = f"{told} {expected.shape}" if expected else "absent"
                raise PipelineError(
                    f"merge.file={self.config.file}: mergekit gives {name} as {found}, in the models it is {want}: "
                    "give out_dtype in the file, or models of one shape"
                )

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of the result in float32, a buffer."""
        assert self.checkpoint is not None
        out = buffers("sum", (stop - start, matrix(self.checkpoint.info(name).shape)[1]))
        self.checkpoint.rows(name, start, stop, out)
        return out
