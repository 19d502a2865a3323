"""Merges checkpoints: each method becomes a formula for one named tensor, and the result streams to disk.

Nothing here needs a whole model in memory: sources are mapped, and one parameter at a time is computed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch

from pipeline.knobs import PipelineError
from pipeline.merge import ties
from pipeline.merge.recipes import Weights, layer_swap_weights, soup_weights
from pipeline.models.anatomy import anatomy
from pipeline.models.checkpoint import (
    DTYPES,
    PIECE_BYTES,
    Checkpoint,
    digest,
    header_bytes,
    read_header,
    same_architecture,
    torch_dtype,
    weights_root,
)
from pipeline.runs import read_manifest

if TYPE_CHECKING:
    from pipeline.config import LayerSwap, MergeStage, Soup, Ties
    from pipeline.config import Merge as MergeConfig
    from pipeline.runs import Parent, Run
    from pipeline.tracking import Tracker

Row = dict[str, Any]
_COPIED = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)


def make(run: Run, work: Path, tracker: Tracker) -> dict[str, Any]:
    """The merge stage: open the parents, state the plan, write the merged checkpoint and its card."""
    config = cast("MergeStage", run.config).merge
    sources = {role: Checkpoint.open(parent.folder) for role, parent in run.parents.items()}
    base = sources.pop("base", None)
    merge = open_merge(config, sources, base)

    rows = merge.plan_rows()
    _print_plan(config, run.parents, rows)
    tracker.table("merge_plan", ["where", "what", "weights"], [_cells(row) for row in rows])
    (work / "plan.json").write_text(json.dumps(rows, indent=2) + "\n")
    (work / "README.md").write_text(_card(config, run.parents, rows))

    digests = merge.write(work, known={role: _on_record(parent) for role, parent in run.parents.items()})
    return {"weights": {"root": weights_root(digests), "digests": digests}, "plan": rows}


@dataclasses.dataclass
class Merge:
    """A merge that is decided but not computed: `merged(name)` computes one tensor, `write` all of them.

    `weights` holds the linear weights of every parameter and is empty for TIES; `rows` is the plan to show.
    """

    sources: dict[str, Checkpoint]
    dtype: str | None  # torch's name; None stores every tensor in the dtype of the sources
    formula: Callable[[str], torch.Tensor]  # parameter name -> float32 tensor
    weights: Weights
    rows: list[Row]

    @property
    def layout(self) -> Checkpoint:
        """The source whose tensor names and files the result takes over: the first."""
        return next(iter(self.sources.values()))

    @property
    def names(self) -> list[str]:
        return self.layout.names

    def stored_dtype(self, name: str) -> str:
        """The safetensors dtype in which a tensor of the result is stored."""
        return DTYPES[self.dtype] if self.dtype else self.layout.info(name).dtype

    def copied_from(self, name: str) -> Checkpoint | None:
        """The one source whose tensor this is, unchanged, or None where it has to be computed."""
        weights = self.weights.get(name, {})
        if list(weights.values()) != [1.0]:
            return None
        source = self.sources[next(iter(weights))]
        return source if source.info(name).dtype == self.stored_dtype(name) else None

    def merged(self, name: str) -> torch.Tensor:
        """One tensor of the result, computed in float32 and cast to the stored dtype.

        Raises PipelineError where the result is not finite, as when a source is not or float16 overflows.
        """
        if source := self.copied_from(name):
            return source.tensor(name)
        dtype = self.stored_dtype(name)
        tensor = self.formula(name).to(torch_dtype(dtype))
        if not bool(torch.isfinite(tensor).all()):
            raise PipelineError(f"{name} is not finite after merging as {dtype}: check sources and merge.dtype")
        return tensor

    def plan_rows(self) -> list[Row]:
        """The plan: `where` (layers a-b, embedding, ...), `what` (kinds), `weights` (source -> weight)."""
        return self.rows

    def write(
        self, folder: Path, files_from: str | None = None, known: dict[str, dict[str, str]] | None = None
    ) -> dict[str, str]:
        """Write the merged checkpoint into an existing folder, tensor by tensor; returns {name: digest}.

        Shards are laid out as in the first source. Config, generation config, tokenizer and chat template
        come from the source `files_from` (default: the first). `known` holds digests of sources on record,
        source -> name -> digest: a tensor copied from one inherits it, and is then not hashed again.
        """
        digests: dict[str, str] = {}
        for file, names in self.layout.files.items():
            with open(folder / file.name, "wb") as stream:
                shapes = {name: self.layout.info(name).shape for name in names}
                stream.write(header_bytes({name: (self.stored_dtype(name), shapes[name]) for name in names}))
                for name in names:
                    digests[name] = self._write_tensor(name, stream, known or {})
        self._write_index(folder)
        self._copy_files(folder, self.sources[files_from] if files_from else self.layout)
        for path in folder.iterdir():
            if path.is_file():
                path.chmod(0o644)  # readable by a group that shares the runs
        return dict(sorted(digests.items()))

    def _write_tensor(self, name: str, stream: BinaryIO, known: dict[str, dict[str, str]]) -> str:
        def written(pieces: Iterator[memoryview]) -> Iterator[memoryview]:
            for piece in pieces:
                stream.write(piece)
                yield piece

        if source := self.copied_from(name):
            info = source.info(name)
            on_record = known.get(next(iter(self.weights[name])), {}).get(name)
            if on_record:
                for _ in written(info.pieces()):
                    pass
                return on_record
            return digest(info.dtype, info.shape, written(info.pieces()), f"{source.folder}: {name}")
        tensor = self.merged(name).contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        pieces = (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))
        return digest(self.stored_dtype(name), tuple(tensor.shape), written(pieces), name)

    def _write_index(self, folder: Path) -> None:
        if len(self.layout.files) == 1:
            return
        headers = [read_header(folder / file.name) for file in self.layout.files]
        index = {
            "metadata": {"total_size": sum(info.nbytes for header in headers for info in header.values())},
            "weight_map": {name: self.layout.info(name).file.name for name in self.names},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _copy_files(self, folder: Path, source: Checkpoint) -> None:
        for name in _COPIED:
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, folder / name)
        if self.dtype and (source.config.get("dtype") or source.config.get("torch_dtype")) != self.dtype:
            # transformers loads in the dtype that config.json names: a stale one would round the merge again
            config = {key: value for key, value in source.config.items() if key != "torch_dtype"}
            (folder / "config.json").write_text(json.dumps(config | {"dtype": self.dtype}, indent=2) + "\n")


def open_merge(config: MergeConfig, sources: dict[str, Checkpoint], base: Checkpoint | None = None) -> Merge:
    """Decide a merge from headers (TIES also reads the weights, for its thresholds and majority).

    `sources` by role: `math` and `language` for layer_swap; "0", "1", ... for soup and ties, which alone
    needs `base`. Raises PipelineError where sources do not fit each other or the method.
    """
    if config.method not in METHODS:
        raise PipelineError(f"merge.method must be one of {', '.join(METHODS)}, got {config.method!r}")
    if config.dtype is not None and config.dtype not in DTYPES:
        raise PipelineError(f"merge.dtype must be one of {', '.join(DTYPES)}, got {config.dtype!r}")
    roles = ["math", "language"]
    if config.method != "layer_swap":
        roles = [str(index) for index in range(len(config.experts))]  # type: ignore[attr-defined]
    if not roles:
        raise PipelineError("merge.experts is empty: give at least one run")
    if set(sources) != set(roles):
        raise PipelineError(f"merge={config.method} needs the sources {roles}, got {list(sources)}")
    sources = {role: sources[role] for role in roles}
    first = sources[roles[0]]
    for name in first.names:
        if first.info(name).dtype not in DTYPES.values():
            raise PipelineError(f"{first.folder}: {name} is stored as {first.info(name).dtype}, not as a float")
    for role in roles[1:]:
        same_architecture(first, sources[role], (_knob(roles[0]), _knob(role)))
    if base is not None:
        same_architecture(first, base, (_knob(roles[0]), "merge.base"), dtypes=False)
    return METHODS[config.method](config, sources, base)


def _layer_swap(config: LayerSwap, sources: dict[str, Checkpoint], base: Checkpoint | None) -> Merge:
    return _linear(config, sources, layer_swap_weights(config, anatomy(sources["math"].names)))


def _soup(config: Soup, sources: dict[str, Checkpoint], base: Checkpoint | None) -> Merge:
    return _linear(config, sources, soup_weights(config, sources["0"].names))


def _linear(config: MergeConfig, sources: dict[str, Checkpoint], weights: Weights) -> Merge:
    def formula(name: str) -> torch.Tensor:
        parts = (weight * sources[source].tensor(name).float() for source, weight in weights[name].items())
        total = next(parts)
        for part in parts:
            total += part
        return total

    return Merge(sources, config.dtype, formula, weights, _grouped(weights))


def _ties(config: Ties, sources: dict[str, Checkpoint], base: Checkpoint | None) -> Merge:
    if base is None:
        raise PipelineError("merge=ties needs merge.base, the model that the experts were trained from")
    if config.trim not in ("model", "tensor"):
        raise PipelineError(f"merge.trim must be model or tensor, got {config.trim!r}")
    names = base.names

    def task_vector(source: str, name: str) -> torch.Tensor:
        return sources[source].tensor(name).float() - base.tensor(name).float()

    def threshold(source: str, over: list[str]) -> float:
        k = ties.kept_count(config.density, sum(math.prod(base.info(name).shape) for name in over))
        return ties.kth_largest(lambda: (task_vector(source, name) for name in over), k)

    of_model = {source: threshold(source, names) for source in sources} if config.trim == "model" else {}

    def trimmed(name: str) -> torch.Tensor:  # (E, *shape)
        limits = of_model or {source: threshold(source, [name]) for source in sources}
        return torch.stack([ties.trim(task_vector(source, name), limits[source]) for source in sources])

    majority = ties.majority_sign(trimmed(name) for name in names)

    def formula(name: str) -> torch.Tensor:
        vectors = trimmed(name)
        mean = ties.disjoint_mean(vectors, ties.elect_sign(vectors, majority))
        return base.tensor(name).float() + config.scale * mean

    said = f"base + {config.scale:g} x TIES of {len(sources)} task vectors, density {config.density:g}"
    rows = [{"where": "everywhere", "what": "all", "weights": {}, "formula": f"{said}, trim {config.trim}"}]
    return Merge(sources, config.dtype, formula, {}, rows)


METHODS: dict[str, Callable[..., Merge]] = {"layer_swap": _layer_swap, "soup": _soup, "ties": _ties}


def _grouped(weights: Weights) -> list[Row]:
    """The weights as a table, from the embeddings up; adjacent layers that are alike share a row."""
    places: dict[int | str, dict[str, set[str]]] = {}  # layer, or kind outside the layers -> weights -> kinds
    for name, site in anatomy(weights).items():
        place = places.setdefault(site.kind if site.layer is None else site.layer, {})
        place.setdefault(json.dumps(weights[name]), set()).add(site.kind)

    def told(place: int | str) -> list[tuple[str, str]]:  # (what, weights)
        found = places[place]
        return sorted(("all" if len(found) == 1 else ", ".join(sorted(k)), row) for row, k in found.items())

    layers = sorted(place for place in places if isinstance(place, int))
    blocks: list[list[Any]] = [list(block) for _, block in itertools.groupby(layers, key=told)]
    rows: list[Row] = []
    for block in [["embedding"], *blocks, ["final_norm"], ["head"]]:
        if block[0] in places:
            where = block[0]
            if isinstance(where, int):
                where = f"layer {where}" if len(block) == 1 else f"layers {where}-{block[-1]}"
            rows += [{"where": where, "what": what, "weights": json.loads(row)} for what, row in told(block[0])]
    return rows


def _knob(role: str) -> str:
    return f"merge.experts[{role}]" if role.isdigit() else f"merge.{role}"


def _order(item: tuple[str, Any]) -> tuple[int, str]:
    role = item[0]  # experts by number; math, whose files and layout the merge takes over, before language
    return (int(role) if role.isdigit() else {"math": 0, "language": 1}.get(role, sys.maxsize), role)


def _cells(row: Row) -> list[str]:
    sum_ = " + ".join(f"{weight:g} {source}" for source, weight in row["weights"].items())
    return [row["where"], row["what"], row.get("formula", sum_)]


def _on_record(parent: Parent) -> dict[str, str]:
    """The digests that a parent's manifest holds; none for what no run made."""
    return ((read_manifest(parent.folder) or {}).get("facts") or {}).get("weights", {}).get("digests", {})


def _print_plan(config: MergeConfig, parents: Mapping[str, Parent], rows: list[Row]) -> None:
    names = ", ".join(f"{role} = {parent.name}" for role, parent in sorted(parents.items(), key=_order))
    print(f"merge {config.method}: {names}", file=sys.stderr)
    for where, what, weights in map(_cells, rows):
        print(f"  {where:<14} {what:<24} {weights}", file=sys.stderr)


def _card(config: MergeConfig, parents: Mapping[str, Parent], rows: list[Row]) -> str:
    """A model card: the recipe, the parents, and the plan."""
    settings = dataclasses.asdict(config)
    for role in ("math", "language", "experts", "base"):  # the parents' names stand below, without paths
        settings.pop(role, None)
    lines = [f"# A merge by {config.method}", "", "| setting | value |", "|---|---|"]
    lines += [f"| merge.{key} | {value} |" for key, value in settings.items()]
    lines += ["", "| source | run |", "|---|---|"]
    lines += [f"| {role} | {parent.name} |" for role, parent in sorted(parents.items(), key=_order)]
    lines += ["", "| where | what | weights |", "|---|---|---|"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join(lines) + "\n"
