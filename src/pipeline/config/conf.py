"""What conf/ offers: its groups, their options, and the groups that each stage reads.

`STAGES` and `METHODS` are handed in by those who have them (`compose.register`), so that configuration knows neither.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from pipeline.config.merging import Merge
from pipeline.config.stages import Stage

STAGES: dict[str, type[Stage]] = {}
METHODS: dict[str, type[Merge]] = {}


def folder() -> Path:
    """conf/ as shipped in the wheel, else that of the checkout."""
    package = Path(__file__).parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parents[1] / "conf"


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (folder() / group).glob("*.yaml"))


def groups() -> list[str]:
    return sorted(path.name for path in folder().iterdir() if path.is_dir())


def presets(method: str) -> list[str]:
    """The options of merge= that are a method with other settings: ties_mergekit of ties."""
    return [option for option in options("merge") if option.startswith(f"{method}_") and option not in METHODS]


def reads(stage: str) -> list[str]:
    """The groups that a stage brings."""
    named = [group for group, _ in defaults(stage)]
    return [*named, "tracking", "launcher"] if (folder() / "stage" / f"{stage}.yaml").is_file() else []


def defaults(stage: str) -> list[tuple[str, str | None]]:
    """The groups that a stage brings, each with its option; None: brought only when asked for."""
    path = folder() / "stage" / f"{stage}.yaml"
    if not path.is_file():
        return []
    defaults = OmegaConf.to_container(OmegaConf.load(path))["defaults"]  # type: ignore[index,call-overload]
    named = [next(iter(item.items())) for item in defaults if isinstance(item, dict)]
    return [(name.removeprefix("/").partition("@")[0], option) for name, option in named]
