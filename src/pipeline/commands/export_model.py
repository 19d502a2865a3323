"""Stage export of a checkpoint: a folder that plain transformers loads, with a model card, here or on the Hub.

Weights of an adapter are added to its base's. Nothing of this machine goes along: no manifest, log or local path.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pipeline.benchmarks import find_benchmark
from pipeline.config.stages import ExportStage
from pipeline.data.benchmarks import hub_sources
from pipeline.errors import PipelineError
from pipeline.evaluate.records import ScoreRow, read_scores
from pipeline.files import fingerprints
from pipeline.hub.publish import publish, ready_for
from pipeline.merge.adapters import Source, open_source
from pipeline.merge.cast import cost_of_cast
from pipeline.merge.compatibility import check_sources
from pipeline.merge.merge import Merging, open_merge
from pipeline.merge.mergekit import FILE
from pipeline.merge.methods.soup import Soup
from pipeline.models.alike import same_architecture
from pipeline.models.checkpoint import DTYPES, Checkpoint, read_json
from pipeline.report.load.scores import percent, primary_of, score_line
from pipeline.runs.folders import finished_names
from pipeline.runs.lineage import base_of
from pipeline.runs.manifest import MANIFEST, Manifest, read_manifest
from pipeline.runs.model_card import CARD, Origin, body_of, card, data_section, origin_of, relation_of
from pipeline.runs.run import Parent
from pipeline.runs.unchanged import check_unchanged
from pipeline.stages.resolver import Resolver
from pipeline.stages.rows import build

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

HUB = "hub:"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")
LOCAL_KEYS = ("name_or_path", "_file")  # how the keys end under which libraries keep paths


def export_model(config: ExportStage) -> str:
    """Write the checkpoint to export.to, and give the folder or the address of its page.

    Raises:
        PipelineError: a place that is taken or cannot be written, models of different licences, a run that was changed.
    """
    target = str(config.export.to)
    assert config.checkpoint is not None
    api = ready_for(target.removeprefix(HUB), "export.to") if target.startswith(HUB) else None
    if api is None:
        refuse_place(Path(target))
    model = Resolver(Path(config.runs_dir), build).model(config.checkpoint, "checkpoint")
    made_of = origin_of(model, Path(config.runs_dir), ask=True)
    licence = licence_of(made_of, config)
    check_unchanged(model.folder)
    merge = whole(model, config)
    name = target.removeprefix(HUB) if api else Path(target).resolve().name
    with TemporaryDirectory(dir=room(config, api is not None), prefix=f".{name.replace('/', '-')}.") as beside:
        folder = Path(beside) / "model"
        folder.mkdir()
        write(merge, folder, config, model)
        text = card_text(name, model, made_of, licence, merge, folder, config)
        (folder / CARD).write_text(text, encoding="utf-8")
        (folder / CARD).chmod(0o644)
        if api is not None:
            return publish(api, name, folder, config.export.private, "export.to")
        place(folder, Path(target))
    return target


def place(folder: Path, target: Path) -> None:
    """Move the export to its place. Over a finished export of the same model only the card, which has its scores, is
    replaced.

    Raises:
        PipelineError: another model's export is there.
    """
    if not (target / CARD).is_file():
        os.rename(folder, target.resolve())  # over an empty folder, too
        return
    new, there = (fingerprints(one) for one in (folder, target))
    if {name: one["sha256"] for name, one in new.items() if name != CARD} != {
        name: one["sha256"] for name, one in there.items() if name != CARD
    }:
        raise PipelineError(f"export.to={target} holds the export of another model: name a new folder")
    os.replace(folder / CARD, target / CARD)


def refuse_place(target: Path) -> None:
    """Refuse a folder that is neither new, empty nor an export, is in none that is there, or is part of a run."""
    if target.is_dir() and any(target.iterdir()) and not all((target / name).is_file() for name in (CARD, CONFIGS[0])):
        raise PipelineError(f"export.to={target} is not empty: name a new folder")
    if target.exists() and not target.is_dir():
        raise PipelineError(f"export.to={target} is a file: name a new folder")
    if not target.resolve().parent.is_dir():
        raise PipelineError(f"export.to={target} is no place for a folder: name one in a folder that is there")
    for above in target.resolve().parents:
        if (above / MANIFEST).is_file():
            raise PipelineError(f"export.to={target} is inside the run {above.name}: name a folder outside of it")


def room(config: ExportStage, on_hub: bool) -> Path:
    """Where the folder is made: beside its place, that one rename publishes it; for the Hub, in runs_dir."""
    place = Path(config.runs_dir) if on_hub else Path(str(config.export.to)).resolve().parent
    place.mkdir(parents=True, exist_ok=True)
    return place


def licence_of(made_of: Origin, config: ExportStage) -> str | None:
    """That of the card. PipelineError where the models that went in have different ones, and none is given."""
    if config.export.licence is not None:
        return config.export.licence
    if len(set(made_of.licences.values())) > 1:
        told = ", ".join(f"{name}: {licence}" for name, licence in made_of.licences.items())
        raise PipelineError(
            f"checkpoint={config.checkpoint} was made of models of different licences ({told}): say which the result "
            "has, export.licence=NAME"
        )
    if not made_of.licences:
        print("warning: no licence is known, so the card has none: export.licence=NAME", file=sys.stderr)
        return None
    return next(iter(made_of.licences.values()))


# ------------------------------------------------------------------------------------------------ what is written


def whole(model: Parent, config: ExportStage) -> Merging:
    """The model as a merge of it alone, in the dtype asked for: copied where that is its own, else cast once."""
    source = open_source(model.folder)
    check_sources({"0": source}, None, lambda _: "checkpoint")
    if not any((one / name).is_file() for one in folders_of(source) for name in TOKENIZERS):
        raise PipelineError(f"checkpoint={config.checkpoint} has no tokenizer: copy that of its base into {model.name}")
    merge = open_merge(Soup(experts=[model.name], dtype=config.export.dtype, form="dense"), {"0": source})
    size, there = merge.bytes()["written"], room(config, str(config.export.to).startswith(HUB))
    if shutil.disk_usage(there).free < size:
        raise PipelineError(
            f"export.to={config.export.to}: {size:,} bytes do not fit where they are written: free some"
        )
    return merge


def folders_of(source: Source) -> list[Path]:
    return [source.folder, *([source.base.folder] if hasattr(source, "base") else [])]


def write(merge: Merging, folder: Path, config: ExportStage, model: Parent) -> None:
    """Weights, configs and tokenizer as a merge writes them, and what mergekit would be asked for."""
    try:
        merge.write(folder, threads=config.threads)
    except PipelineError as error:
        if config.export.dtype != "float16" or "is not finite after merging as F16" not in str(error):
            raise
        tensor = str(error).partition(" ")[0]
        raise PipelineError(
            f"export.dtype=float16: {tensor} holds values above 65504, float16's largest: give export.dtype=bfloat16"
        ) from error
    for path in (folder / name for name in CONFIGS if (folder / name).is_file()):
        path.write_text(
            json.dumps(without_paths(read_json(path)), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    if (model.folder / FILE).is_file():
        shutil.copyfile(model.folder / FILE, folder / FILE)
        (folder / FILE).chmod(0o644)


def without_paths(value: Any) -> Any:
    """The same JSON without the entries in which libraries keep where a file was."""
    if isinstance(value, list):
        return [without_paths(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_paths(one)
        for key, one in value.items()
        if not (str(key).endswith(LOCAL_KEYS) and isinstance(one, str | None))
    }


# ------------------------------------------------------------------------------------------------ what is said of it


def card_text(
    name: str, model: Parent, made_of: Origin, licence: str | None, merge: Merging, folder: Path, config: ExportStage
) -> str:
    """The card of the run, with what the cast cost and how the model scored."""
    runs_dir, manifest = Path(config.runs_dir), read_manifest(model.folder)
    ours = body_of(model, runs_dir) if manifest else None
    sections = [ours or f"# {name}\n\nThe weights of {model.name}.\n\n{data_section(made_of)}"]
    if told := cast(merge, folder, model, config):
        print(told, file=sys.stderr)
        sections.append(f"## Weights\n\nThey were {told}.\n")
    scored = scores_of(manifest, runs_dir) if manifest else []
    if scored:
        before = "the weights before they were cast" if told else "these weights"
        rows = [f"| {' | '.join(cell.strip() for cell in score_line(row))} |" for row, _ in scored]
        head = [f"Scores of {before}, by lm-evaluation-harness, out of 100 with standard errors.", ""]
        head += ["| task | language | metric | score | questions |", "|---|---|---|---|---|"]
        sections.append("\n".join(["## Results", "", *head, *rows]) + "\n")
    merged = manifest is not None and manifest.stage == "merge"
    results = [result(row, asked) for row, asked in scored]
    return card(
        name, "\n".join(sections), made_of, tags=tags_of(manifest), relation=relation_of(made_of, merged),
        licence=licence, results=results,
    )  # fmt: skip


def tags_of(manifest: Manifest | None) -> list[str]:
    if manifest is None:
        return []
    merge, sft = manifest.config.get("merge") or {}, manifest.config.get("sft") or {}
    return [str(one) for one in (manifest.stage, merge.get("method"), sft.get("name")) if one]


def cast(merge: Merging, folder: Path, model: Parent, config: ExportStage) -> str | None:
    """What the cast cost, in words; None where no value was rounded."""
    source = merge.layout
    if all(merge.stored_dtype(name) in ("F32", source.info(name).dtype) for name in merge.names):
        return None
    base = None
    with suppress(PipelineError):  # one that is not known, or not here, leaves a number out
        there = base_of(model, config, "checkpoint").folder
        found = open_source(there) if there.is_dir() else None
        if found:
            same_architecture(source, found, dtypes=False)
        base = found
    stored = "+".join(sorted({source.info(name).dtype for name in merge.names}))
    cost = cost_of_cast(source, Checkpoint.open(folder), base, config.threads)
    return f"cast from {stored} to {DTYPES[str(config.export.dtype)]}: {cost}"


def scores_of(manifest: Manifest, runs_dir: Path) -> list[tuple[ScoreRow, dict[str, Any]]]:
    """The main score of each task and language that was scored on exactly these weights, with what was asked."""
    found = []
    for name in finished_names(runs_dir, "eval-"):
        one = read_manifest(runs_dir / name)
        if one and manifest.weights_root and one.facts.get("weights_root") == manifest.weights_root:
            rows, _ = read_scores(runs_dir / name / "scores.json")
            found += [(row, one.config) for row in primary_of(rows) if row.value is not None]
    return found


def result(row: ScoreRow, asked: dict[str, Any]) -> EvalResult:
    """A score as the Hub's model-index has it. Questions that were local files are of no repository."""
    from huggingface_hub import EvalResult

    known = {name: source.hub for name, source in hub_sources()}
    benchmark = find_benchmark(row.task)
    task, title = (benchmark.name, benchmark.title) if benchmark else (row.task, row.task)
    assert row.value is not None
    limit = asked["eval"].get("limit")
    return EvalResult(
        task_type="text-generation", dataset_name=f"{title} ({row.where})",
        dataset_type=(None if asked.get("data_root") else known.get(task)) or task, dataset_config=row.where,
        dataset_split=asked["eval"].get("split", "test"),
        dataset_args={"num_fewshot": row.num_fewshot} | ({"limit": limit} if limit else {}),
        metric_type=row.metric, metric_name=f"{row.task} {row.num_fewshot}-shot {row.metric}",
        metric_value=round(row.value * percent(row.metric), 2),
    )  # fmt: skip
