"""The state stored in a report's folder: the settings of its table, the failed runs, and the
finished cells.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
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
    """table, data_root, every: as in the last stage=table; failed: run -> reason; finished: cells
    that are shown.
    """

    table: str = ""
    data_root: str | None = None
    every: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    finished: int = 0

    @classmethod
    def of(cls, config: TableStage) -> Reported:
        """Return the stored state of a table's report.

        It is empty without report.json, or with that of another program.
        """
        from pipeline.tables.planned_runs import load_table

        folder = Path(config.runs_dir) / "reports" / load_table(config).name
        try:
            return TypeAdapter(cls).validate_json((folder / FILE).read_bytes())
        except (OSError, ValueError):
            return cls()

    def asked_again(self, config: Asking) -> Asking:
        """Return the configuration with the settings of the last stage=table, unless the command
        sets data_root or every.
        """
        if config.data_root is not None or config.every or not (self.data_root or self.every):
            return config
        asked = replace(config, data_root=self.data_root, every=dict(self.every))
        print(f"as stage=table was asked: {' '.join(overrides_of(asked))}", file=sys.stderr)
        return asked

    def refuse_another(self, config: TableStage) -> None:
        """Raise PipelineError if the report is of another file: two tables may have one name."""
        from pipeline.tables.planned_runs import find_table, load_table

        table, folder = config.table, Path(config.runs_dir) / "reports" / load_table(config).name
        if not self.table or Path(self.table).resolve() == Path(table).resolve():
            return
        try:
            earlier, _ = find_table(self.table)
        except PipelineError:  # the file was moved
            return
        if earlier != find_table(table)[0]:
            raise PipelineError(
                f"{folder} holds the report of table={self.table}, which table={table} would"
                " replace. Give one of them another name (name: NAME), or delete the folder."
            )

    def refuse_fewer(
        self, folder: Path, finished: int, fewer: bool, reasons: Sequence[str] = ()
    ) -> None:
        """Raise PipelineError if fewer cells are finished than the existing page shows, unless
        `fewer`. reasons: why cells are missing.
        """
        if (folder / "index.html").is_file() and finished < self.finished and not fewer:
            raise PipelineError(
                f"{folder / 'index.html'} shows {self.finished} finished cells and this one would"
                f" show {finished}{f' ({reasons[0]})' if reasons else ''}: give report.fewer=true"
                " to replace it"
            )

    def write_state(self, folder: Path, **changed: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(
            folder / FILE, json.dumps(asdict(replace(self, **changed)), indent=1) + "\n"
        )


def overrides_of(config: TableStage) -> list[str]:
    """Return the settings of a table that decide its results, as a command line gives them."""
    overrides = [override_of(f"every.{key}", value) for key, value in config.every.items()]
    return overrides + ([f"data_root={config.data_root}"] if config.data_root else [])
