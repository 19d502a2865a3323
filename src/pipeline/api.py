"""The commands as functions: keywords are the words of a command, and what it makes comes back as
folders and frames.

    from pipeline.api import evaluate, merge, table, train

    math = train(expert="math", model="./base", data_root="./data")
    swahili = train(expert="sw", model="./base", data_root="./data", learning_rate=1e-5)
    swap = merge("layer_swap", math=math, language=swahili)
    scores = evaluate(checkpoint=swap, eval="mgsm_2shot", languages=["sw"], data_root="./data")
    page, scores, answers = table("./study.yaml", every={"seed": 1})

A knob of the command's own group needs no prefix: `learning_rate` of train is sft.learning_rate,
`bottom_layers` of merge is merge.bottom_layers. Others come as on the command line, **{"data.size":
1000}, or as mappings, data={"size": 1000}; options of one's own by config_dir="./conf_of_mine". All
functions do nothing twice, write progress to standard error, and raise PipelineError, one sentence,
where the command would end with an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.config import conf
from pipeline.config.compose import compose_given
from pipeline.config.defaults import left_open
from pipeline.config.evaluation import Eval
from pipeline.config.harness_tasks import forget_files
from pipeline.config.stages import Stage
from pipeline.files import added_conf
from pipeline.launch.launchers import stage_output
from pipeline.progress import quiet
from pipeline.tables.table_yaml import dotted

if TYPE_CHECKING:
    from pandas import DataFrame


class Report(NamedTuple):
    """A table's page, its scores (a row per run, task, language and metric) and its answers: see
    report.results.
    """

    page: Path
    scores: DataFrame
    answers: DataFrame

    @property
    def cells(self) -> DataFrame:
        """The cells as the page shows them, a row each: row, column, value, low, high, n ..."""
        import pandas as pd

        return pd.read_csv(self.page.with_name("cells.csv"), keep_default_na=False, na_values=[""])


def train(expert: str, stage: str = "sft", **knobs: Any) -> Path:
    """The folder of a trained expert; stage="cpt" for continual pretraining.

    Further keywords: model, sft (a method), recipe, partition, seed ..., and knobs of sft.
    """
    return Path(answer(stage, "sft", {"expert": expert, **knobs}))


def merge(method: str, **knobs: Any) -> Path:
    """The folder of a merge: its runs and knobs by name (math, language, experts, bottom_layers
    ...).
    """
    return Path(answer("merge", "merge", {"merge": method, **knobs}))


def evaluate(**knobs: Any) -> DataFrame:
    """Scores of a checkpoint, or of a merge in memory, a row per task, language and metric, in
    percent as those of `table`; BLEU, chrF++, perplexities and bits on their own scale. `run` names
    the run, whose folder, with its answers in samples/, is attrs["folder"].

    Keywords: checkpoint, or merge with its runs and knobs; eval or tasks; languages ...; knobs of
        eval.
    """
    import pandas as pd

    from pipeline.evaluate.records import read_scores
    from pipeline.report.render.tidy import in_percent

    folder = Path(answer("eval", "eval", knobs))
    rows = [
        {"run": folder.name, **in_percent(row)} for row in read_scores(folder / "scores.json")[0]
    ]
    frame = pd.DataFrame(rows)
    frame.attrs["folder"] = folder
    return frame


def table(table: str | Path, **knobs: Any) -> Report:
    """Every run and score of a table, computed where missing, and its page.

    Keywords: every={...}, launcher ...
    """
    return report_at(answer("table", None, {"table": table, **knobs}))


def report(table: str | Path, **knobs: Any) -> Report:
    """The page of a table, by what is computed. Keywords as of `table`."""
    return report_at(answer("report", None, {"table": table, **knobs}))


def report_at(page: str) -> Report:
    from pipeline.report import results

    return Report(Path(page), *results(Path(page).parent))


def answer(stage: str, group: str | None, knobs: dict[str, Any]) -> str:
    """What the command of a stage prints. config_dir: a folder of options, as --config-dir."""
    quiet()
    folder = knobs.pop("config_dir", None)
    if folder and Path(folder).resolve() not in added_conf():
        conf.add_folder(str(folder))
    forget_files()
    settings = {"stage": stage, **spelled(stage, group, knobs)}
    return stage_output(compose_given(settings), {**settings, **left_open(settings)})


def spelled(stage: str, group: str | None, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords as words of the command line: those that are neither a group nor a key of the
    command are knobs of `group`, or of the merge that is evaluated; what a mapping holds are dotted
    keys.
    """
    of_stage = [item.name for item in fields(conf.stage_class(stage) or Stage)]
    readable = {*conf.groups_read(stage), *of_stage, "every"}
    method = conf.method_of(knobs.get("merge"))
    of_merge = set()
    if method:
        of_merge = {item.name for item in fields(method)} - {item.name for item in fields(Eval)}
    by_name: dict[str, Any] = {}
    for key, value in knobs.items():
        own_group = "merge" if key in of_merge else group
        by_name[
            key if key in readable or "." in key or own_group is None else f"{own_group}.{key}"
        ] = value
    # a wrong key all the same
    empty = {}
    for key, value in by_name.items():
        if value == {} and key not in readable:
            empty[key] = value
    return empty | {
        key: plain(value) for key, value in dotted(by_name, f"stage={stage}", "").items()
    }


def plain(value: Any) -> Any:
    """A value with paths as text, in which a / tells them from names."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return os.path.join(".", value)
    return value
