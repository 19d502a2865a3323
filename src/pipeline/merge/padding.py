"""Experts of one tokenizer whose embeddings are padded to different numbers of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Adapted, Source
from pipeline.models.checkpoint import with_rows
from pipeline.models.names import has_row_per_token


@dataclass
class Padding:
    """How the tensors `names` are merged: the first `common` rows like any other tensor, and the
    rows after them, which are padding, are those of the source `role`. `whole` holds the sources
    with all of their rows.
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

    def describe(self) -> dict[str, object]:
        """Return the plan's row for the padding."""
        where = f"rows {self.common}-{self.rows - 1}"
        return {"where": where, "what": "embedding, head", "weights": {self.role: 1.0}}


def align_padding(
    sources: Mapping[str, Source], files_from: str | None = None
) -> tuple[dict[str, Source], Padding | None]:
    """Return the sources with the rows that all of them have, and how the padding is merged.

    The padding is None if all sources have as many rows. Otherwise the expert with the most rows
    gives it.

    Raises:
        PipelineError: merge.files_from names an expert with another number of rows than the merge.
    """
    names = differing_rows(sources)
    if not names:
        return dict(sources), None
    rows = {role: source.info(names[0]).shape[0] for role, source in sources.items()}
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


def differing_rows(sources: Mapping[str, Source]) -> tuple[str, ...]:
    """Return the embedding and the head if they differ between sources in their number of rows and
    in nothing else.
    """
    names = []
    for name in next(iter(sources.values())).names:
        if has_row_per_token(name):
            names.append(name)
    counts = set()
    for name in names:
        shapes = []
        for source in sources.values():
            if name in source.infos:
                shapes.append(source.infos[name].shape)
        if len(shapes) < len(sources) or len({shape[1:] for shape in shapes}) > 1:
            return ()
        counts.add(tuple(shape[0] for shape in shapes))
    if len(counts) != 1 or len(set(counts.pop())) == 1:
        return ()
    return tuple(names)


def _clip(source: Source, names: tuple[str, ...], rows: int) -> Source:
    """Return the model with the first rows of these tensors."""
    infos = dict(source.infos)
    for name in infos.keys() & set(names):
        info = infos[name]
        infos[name] = replace(
            info, shape=(rows, *info.shape[1:]), nbytes=info.nbytes * rows // info.shape[0]
        )
    clipped = replace(source, infos=infos, config=with_rows(source.config, rows))
    if isinstance(clipped, Adapted):
        clipped.base, clipped.replaced = (
            _clip(part, names, rows) for part in (clipped.base, clipped.replaced)
        )
    return clipped
