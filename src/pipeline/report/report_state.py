"""The state in a report's folder: its table's settings and failed runs."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from pipeline.config.overrides import override_of
from pipeline.config.stages import TableStage
from pipeline.errors import PipelineError
from pipeline.files import write_atomically

FILE = "report.json"
Asking = TypeVar("Asking", bound=TableStage)


@dataclass
class Reported:
    """The content of report.json.

    Attributes:
        table: As in the last stage=table.
        data_root: As in the last stage=table.
        every: As in the last stage=table.
        failed: run -> reason.
    """

    table: str = ""
    data_root: str | None = None
    every: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: TableStage) -> Reported:
        """Return the stored state of a table's report.

        It is empty without report.json, or if another program wrote that file.
        """
        try:
            return TypeAdapter(cls).validate_json((report_folder(config) / FILE).read_bytes())
        except (OSError, ValueError):
            return cls()

    def asked_again(self, config: Asking) -> Asking:
        """Return the configuration with the settings of the last stage=table.

        It is unchanged if the command sets data_root or every.
        """
        if config.data_root is not None or config.every or not (self.data_root or self.every):
            return config
        asked = replace(config, data_root=self.data_root, every=dict(self.every))
        overrides = " ".join(overrides_of(asked))
        print(f"With the settings of the last stage=table: {overrides}", file=sys.stderr)
        return asked

    def other_table(self, config: TableStage) -> str:
        """Return a sentence if the report shows another table of the same name, or ""."""
        from pipeline.tables.table_files import find_table

        if self.table in ("", config.table):
            return ""
        current, _ = find_table(config.table)
        with suppress(PipelineError):  # the earlier file was moved
            earlier, _ = find_table(self.table)
            if earlier != current:
                return (
                    f"{report_folder(config)} holds the report of table={self.table}, which"
                    f" table={config.table} would replace. Give one table another name"
                    " (name: NAME), or delete the folder."
                )
        return ""

    def write_state(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps(asdict(self), indent=1)
        write_atomically(folder / FILE, content + "\n")


def overrides_of(config: TableStage) -> list[str]:
    """Return the settings of a table that decide its results, as command-line overrides."""
    overrides = [override_of(f"every.{key}", value) for key, value in config.every.items()]
    if config.data_root:
        overrides.append(f"data_root={config.data_root}")
    return overrides


def report_folder(config: TableStage) -> Path:
    from pipeline.tables.table_files import load_table

    return Path(config.runs_dir) / "reports" / load_table(config).name
