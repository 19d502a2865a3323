"""How far a merge is from the base: what can be known of a configuration without asking it anything."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from pipeline.files import write_atomically
from pipeline.merge.adapters import Source, open_source
from pipeline.merge.formulas import by_size, weighted_sum
from pipeline.merge.merge import Merging
from pipeline.merge.stage import merge_of
from pipeline.models.floats import buffers, in_threads, pieces
from pipeline.progress import say
from pipeline.runs.lineage import base_of, one_base
from pipeline.runs.run import Run


def relative_norm(run: Run[Any]) -> float:
    """The norm of a merge's task vector over the mean norm of its experts', over all parameters. Reads all weights,
    once: the number is stored below runs_dir, and outlives the weights.
    """
    stored = run.runs_dir / ".norms" / run.hash
    if not stored.is_file():
        say("computing the norm of a merge's task vector")
        value = measure_relative_norm(run)
        stored.parent.mkdir(exist_ok=True)
        write_atomically(stored, f"{value!r}\n")
    return float(stored.read_text(encoding="utf-8"))


def measure_relative_norm(run: Run[Any]) -> float:
    merge = merge_of(run)
    roles = list(merge.config.references())
    base = merge.sources.get("base")
    if base is None:
        experts = [run.parents[role] for role in roles if "base" not in run.parents]
        bases = [(expert.name, base_of(expert, run.config)) for expert in experts]
        base = open_source((run.parents.get("base") or one_base(bases, "merge.experts")).folder)
    merge.ready(run.config.threads)
    tasks = [partial(squared_norms, merge, base, roles, name) for name in by_size(base)]
    own, *others = np.sqrt(np.sum(in_threads(tasks, run.config.threads), axis=0))
    return float(own / np.mean(others))


def squared_norms(merge: Merging, base: Source, roles: list[str], name: str) -> np.ndarray:
    """[|merge - base|^2, |expert - base|^2 of each role] of one tensor, float64."""
    sums = np.zeros(1 + len(roles))
    for start, stop in pieces(base.info(name).shape):
        for index, role in enumerate(["", *roles]):
            if role:
                values = weighted_sum([(1.0, merge.sources[role])], name, start, stop)
            else:
                values = merge.formula(name, start, stop)
            origin = buffers("origin", values.shape)
            base.rows(name, start, stop, origin)
            change = np.subtract(values, origin, dtype=np.float64)
            sums[index] += float(np.vdot(change, change))
    return sums
