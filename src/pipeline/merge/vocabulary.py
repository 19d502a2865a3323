"""Experts of one tokenizer whose embeddings have other numbers of rows: padded, or with tokens added on one side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Adapted, Source
from pipeline.merge.same_tokenizer import added_tokens
from pipeline.models.checkpoint import with_rows
from pipeline.models.names import has_row_per_token


@dataclass
class Vocabulary:
    """How vocabularies are merged: the first `common` rows of these tensors like any other tensor, the further ones, up
    to as many as `role` has, are that source's. `whole`: the sources with all of their rows."""

    common: int
    role: str
    names: tuple[str, ...]
    whole: dict[str, Source]

    @property
    def giver(self) -> Source:
        return self.whole[self.role]

    @property
    def rows(self) -> int:
        return self.giver.info(self.names[0]).shape[0] if self.names else self.common

    def describe(self) -> list[dict[str, object]]:
        """The plan's row for the further rows."""
        if self.rows == self.common:
            return []
        where = f"rows {self.common}-{self.rows - 1}"
        return [{"where": where, "what": "embedding, head", "weights": {self.role: 1.0}}]


def align_vocabularies(
    sources: Mapping[str, Source], wanted: str | None, files_from: str | None = None
) -> tuple[dict[str, Source], Vocabulary | None]:
    """The sources, the base among them, with the rows that all have, and how the vocabularies are merged; None where
    all have as many rows.

    wanted: `union` takes the tokenizer and the number of rows of the expert with the most tokens, and its rows from the
    first token on that another lacks, whose row there is padding; `common` takes the tokenizer of that with the fewest;
    None: there are no other tokens, and the most rows are taken. Raises PipelineError where files_from names a source
    of another number of rows.
    """
    names = differing_rows(sources)
    if not names and wanted is None:
        return dict(sources), None
    rows = {role: source.info(names[0]).shape[0] if names else 0 for role, source in sources.items()}
    tokens = {role: added_tokens(source).values() for role, source in sources.items() if role != "base"}
    order = {role: (len(added), rows[role]) for role, added in tokens.items()}
    if wanted and len(set(order.values())) == 1:
        raise PipelineError(f"merge.vocabulary={wanted}: the experts have one vocabulary: leave it out")
    role = (min if wanted == "common" else max)(order, key=order.__getitem__)
    own = {token for added in tokens.values() for token in {*tokens[role]} - {*added}}  # none where it has the fewest
    if own and not names:
        names = tuple(filter(has_row_per_token, sources[role].names))
        rows = {other: source.info(names[0]).shape[0] for other, source in sources.items()}
    if not names:
        return dict(sources), Vocabulary(0, role, (), dict(sources))
    if files_from in order and rows[files_from] != rows[role]:
        raise PipelineError(
            f"merge.files_from={files_from}: its vocabulary has {rows[files_from]} rows, the merge {rows[role]}: leave "
            "it out"
        )
    common = min([*rows.values(), *own])
    clipped = {role: _clip(source, names, common) for role, source in sources.items()}
    return clipped, Vocabulary(common, role, names, dict(sources))


def differing_rows(sources: Mapping[str, Source]) -> tuple[str, ...]:
    """The embedding and the head, if they have other numbers of rows, all of them alike, and are else the same."""
    names = list(filter(has_row_per_token, next(iter(sources.values())).names))
    shapes = [[source.infos[name].shape for source in sources.values() if name in source.infos] for name in names]
    rows = {tuple(shape[0] for shape in of_name) for of_name in shapes}
    if len(rows) != 1 or any(len({shape[1:] for shape in of_name}) > 1 for of_name in shapes):
        return ()
    (counts,) = rows
    return tuple(names) if len(counts) == len(sources) and len(set(counts)) > 1 else ()


def _clip(source: Source, names: tuple[str, ...], rows: int) -> Source:
    """The model with the first rows of these tensors."""
    infos = dict(source.infos)
    for name in infos.keys() & set(names):
        info = infos[name]
        infos[name] = replace(info, shape=(rows, *info.shape[1:]), nbytes=info.nbytes * rows // info.shape[0])
    clipped = replace(source, infos=infos, config=with_rows(source.config, rows))
    if isinstance(clipped, Adapted):
        clipped.base, clipped.replaced = (_clip(part, names, rows) for part in (clipped.base, clipped.replaced))
    return clipped
