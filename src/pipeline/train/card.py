"""The model card of a training: how it was trained, from what, and on which sets."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from pipeline.config.knob import format_value
from pipeline.config.stages import TrainStage
from pipeline.runs.model_card import CARD, data_section, origin_from_config, render_card
from pipeline.runs.run import Run, flatten_dict


def write_card(run: Run[TrainStage], folder: Path) -> None:
    (folder / CARD).write_text(card_of(run), encoding="utf-8")


def card_of(run: Run[TrainStage]) -> str:
    """Text of the model card: settings that differ from this program's defaults, and parents by name, without paths."""
    config, decided = run.config, run.decided_by["config"]
    made_of = origin_from_config(run.name, asdict(config), run.parents, Path(config.runs_dir))
    base = run.parents["model"].name if "model" in run.parents else "random weights"
    lines = [
        f"# {run.label}",
        "",
        f"Trained from {base} on `expert={config.expert.name}`, with `stage={config.stage} sft={config.sft.name}`. "
        "All other settings are at their defaults.",
        "",
        "| setting | value |",
        "|---|---|",
        *(
            f"| {key} | {format_value(value)} |"
            for key, value in sorted(flatten_dict(decided).items())
            if key != "stage"
        ),
        "",
        data_section(made_of),
    ]
    adapter = config.sft.adapter != "none"
    tags = [config.stage, config.sft.name, *(["partition-" + config.partition.name] if config.partition else [])]
    return render_card(run.name, "\n".join(lines), made_of, tags=tags, relation="adapter" if adapter else "finetune")
