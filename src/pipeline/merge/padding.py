"""Merges of models with one tokenizer whose embeddings are padded to different numbers of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Adapted, Source
from pipeline.models.checkpoint import with_values
from pipeline.models.names import has_row_per_token


@dataclass
class Padding:
    """How rows of padding are merged.

    Args:
        common: the number of rows that all sources have. They are merged as other tensors are.
        role: the source whose rows the result has after the common rows.
        names: the tensors with rows of padding.
        whole: the sources with all of their rows.
    """

    common: int
    role: str
    names: tuple[str, ...]
    whole: dict[str, Source]

    @property
    def giver(self) -> Source:
        return self.whole[self.role]

    @property
    def rows(self) -> int:
        return self.giver.info(self.names[0]).shape[0]

    def described(self) -> str:
        rows = f"{self.common}-{self.rows - 1}"
        return f"rows {rows} of embedding and head: padding of {self.role}"


def align_padding(
    sources: Mapping[str, Source], files_from: str | None = None
) -> tuple[dict[str, Source], Padding | None]:
    """Return the sources cut to their common rows, and how the padding is merged.

    The padding is None if all sources have the same number of rows. Otherwise it is the padding of
    the expert with the most rows.

    Raises:
        PipelineError: merge.files_from names an expert with fewer rows than the merge.
    """
    first = next(iter(sources.values()))
    names = tuple(filter(has_row_per_token, first.names))
    rows = {role: token_rows(source, names) for role, source in sources.items()}
    if 0 in rows.values() or len(set(rows.values())) == 1:
        return dict(sources), None
    experts = [role for role in sources if role != "base"]
    widest = max(experts, key=lambda role: rows[role])
    if files_from in experts and rows[files_from] != rows[widest]:
        raise PipelineError(
            f"merge.files_from={files_from}: its embeddings have {rows[files_from]} rows, but the"
            f" merge has {rows[widest]}. Leave it out."
        )
    common = min(rows.values())
    clipped = {role: _clip(source, names, common) for role, source in sources.items()}
    return clipped, Padding(common, widest, names, dict(sources))


def token_rows(source: Source, names: Sequence[str]) -> int:
    """Return the number of rows that the embedding and the head have, or 0 if they differ."""
    counts = {source.infos[name].shape[0] for name in names if name in source.infos}
    if len(counts) == 1:
        return counts.pop()
    return 0


def _clip(source: Source, names: tuple[str, ...], rows: int) -> Source:
    """Return a model with only the first rows of these tensors."""
    infos = dict(source.infos)
    for name in infos.keys() & set(names):
        info = infos[name]
        stored_rows, *columns = info.shape
        nbytes = info.nbytes * rows // stored_rows
        infos[name] = replace(info, shape=(rows, *columns), nbytes=nbytes)
    clipped = replace(source, infos=infos, config=with_values(source.config, {"vocab_size": rows}))
    if isinstance(clipped, Adapted):
        clipped.base = _clip(clipped.base, names, rows)
        clipped.replaced = _clip(clipped.replaced, names, rows)
    return clipped
