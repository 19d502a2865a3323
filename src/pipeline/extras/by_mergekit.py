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
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Source
from pipeline.merge.formulas import Rows
from pipeline.models.alike import find_differences
from pipeline.models.checkpoint import DTYPES, Checkpoint
from pipeline.runs.provenance import environment_for
from pipeline.text import one_line


class Result:
    """What mergekit makes of sources, by role; nothing before `compute`."""

    def __init__(self, config: Any, sources: Mapping[str, Source]) -> None:
        self.config, self.sources = config, sources
        self.folder: Any = None
        self.checkpoint: Checkpoint | None = None

    def compute(self, threads: int | None) -> None:
        """Run mergekit. Raises PipelineError where it stops, or gives other tensors than the sources have."""
        self.folder = tempfile.TemporaryDirectory(prefix="mergekit-")  # deleted with this object
        place = Path(self.folder.name)
        size = max(sum(source.info(name).nbytes for name in source.names) for source in self.sources.values())
        if shutil.disk_usage(place).free < size:
            raise PipelineError(f"{place.parent} has no {size:,} bytes for mergekit's result: set TMPDIR elsewhere")
        links = {role: place / f"model_{role}" for role in self.sources}
        for role, link in links.items():  # a model may be there twice: as an expert and as the base in its place
            link.symlink_to(self.sources[role].folder.resolve(), target_is_directory=True)
        names = {model: str(links[role]) for model, role in self.config.roles().items() if role in links}
        (place / "merge.json").write_text(json.dumps(self.config.with_models(names)))  # JSON is YAML
        self._run(place, threads)
        self.checkpoint = Checkpoint.open(place / "out")
        self._compare(next(iter(self.sources.values())), self.checkpoint)

    def _run(self, place: Path, threads: int | None) -> None:
        """`mergekit-yaml`, by its module: the command may be installed elsewhere than beside its Python."""
        python = self.config.mergekit_python
        executable = os.path.abspath((shutil.which(python) or python) if python else sys.executable)
        words = [executable, "-m", "mergekit.scripts.run_yaml", "merge.json", "out", "--no-copy-tokenizer", "--quiet"]
        words += ["--no-write-model-card", "--random-seed", str(self.config.seed), "--device", "cpu"]
        words += ["--num-threads", str(threads)] if threads else []
        process = subprocess.run(words, env=environment_for(python), cwd=place, capture_output=True, text=True)
        if process.returncode:
            reason = one_line(process.stderr)[-300:] or f"exit status {process.returncode}"
            raise PipelineError(f"merge.file={self.config.file}: mergekit stopped ({reason})")

    def _compare(self, layout: Source, result: Checkpoint) -> None:
        """Raise PipelineError where the result has other tensors than the first source, or another dtype than told."""
        dtype = self.config.result_dtype()
        tensors = find_differences(replace(result, infos=layout.infos), result)
        dtypes = (
            (f"{name} as {right}", f"{name} as {info.dtype}")
            for name, info in result.infos.items()
            if info.dtype != (right := DTYPES[dtype] if dtype else layout.info(name).dtype)
        )
        for right, got in chain(tensors, dtypes):
            raise PipelineError(
                f"merge.file={self.config.file}: mergekit gives {got}, of these models it is {right}: "
                "give out_dtype in the file, or models of one shape"
            )

    def formula(self, name: str) -> Rows:
        """Rows of the result in float32."""
        assert self.checkpoint is not None
        return partial(self.checkpoint.rows, name)
