"""The commands as Python functions. Results are folders and data frames.

    from pipeline.api import evaluate, merge, table, train

    math = train(expert="math", model="./base", data_root="./data")
    swahili = train(expert="sw", model="./base", data_root="./data", learning_rate=1e-5)
    swap = merge("layer_swap", math=math, language=swahili)
    scores = evaluate(checkpoint=swap, eval="mgsm_2shot", languages=["sw"], data_root="./data")
    page, scores, answers = table("./study.yaml", every={"seed": 1})

Keywords are the options of a command. An option of the command's own group needs no prefix:
`learning_rate` of train is sft.learning_rate, and `bottom_layers` of merge is merge.bottom_layers.
Write other options as on the command line, **{"data.size": 1000}, or as mappings,
data={"size": 1000}. config_dir="./conf_of_mine" adds a folder of options.

A finished run is not computed again. Progress goes to standard error. All functions raise
PipelineError, with one sentence, where the command would print an error.
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
    """The results of a table, as stage=report writes them.

    Attributes:
        page: its page.
        scores: a row per run, task, language and metric.
        answers: a row per answer; see report.results.
    """

    page: Path
    scores: DataFrame
    answers: DataFrame

    @property
    def cells(self) -> DataFrame:
        """Return the cells of the page, with a row each: row, column, value, low, high, n ..."""
        import pandas as pd

        return pd.read_csv(self.page.with_name("cells.csv"), keep_default_na=False, na_values=[""])


def train(expert: str, stage: str = "sft", **knobs: Any) -> Path:
    """Return the folder of a trained expert; stage="cpt" continues pretraining.

    Further keywords are model, sft (a method), recipe, partition, seed ..., and options of sft.
    """
    return Path(answer(stage, "sft", {"expert": expert, **knobs}))


def merge(method: str, **knobs: Any) -> Path:
    """Return the folder of a merge.

    Keywords are its runs and options: math, language, experts, bottom_layers ...
    """
    return Path(answer("merge", "merge", {"merge": method, **knobs}))


def evaluate(**knobs: Any) -> DataFrame:
    """Return the scores of a checkpoint or of a merge in memory.

    There is a row per task, language and metric. Scores are in percent as in `table`; BLEU, chrF++,
    perplexities and bits keep their own scale. attrs["folder"] is the folder of the run, with its
    answers in samples/.

    Keywords are checkpoint, or merge with its runs and options; eval or tasks; languages ...;
    options of eval.
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
    """Compute the missing runs of a table and return its results.

    Keywords are every={...}, launcher ...
    """
    return report_at(answer("table", None, {"table": table, **knobs}))


def report(table: str | Path, **knobs: Any) -> Report:
    """Return the results of a table's finished runs. Keywords are those of `table`."""
    return report_at(answer("report", None, {"table": table, **knobs}))


def report_at(page: str) -> Report:
    from pipeline.report import results

    return Report(Path(page), *results(Path(page).parent))


def answer(stage: str, group: str | None, knobs: dict[str, Any]) -> str:
    """Return what the command of a stage prints.

    config_dir is a folder of options, as with --config-dir.
    """
    quiet()
    folder = knobs.pop("config_dir", None)
    if folder and Path(folder).resolve() not in added_conf():
        conf.add_folder(str(folder))
    forget_files()
    settings = {"stage": stage, **spelled(stage, group, knobs)}
    return stage_output(compose_given(settings), {**settings, **left_open(settings)})


def spelled(stage: str, group: str | None, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords as options of the command line.

    A keyword that is neither a group nor a key of the command is an option of `group`, or of the
    merge that is evaluated. The items of a mapping become dotted keys.
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
        if key not in readable and "." not in key and own_group is not None:
            key = f"{own_group}.{key}"
        by_name[key] = value
    # A wrong key in both cases.
    empty = {}
    for key, value in by_name.items():
        if value == {} and key not in readable:
            empty[key] = value
    given = dotted(by_name, f"stage={stage}", "")
    return empty | {key: plain(value) for key, value in given.items()}


def plain(value: Any) -> Any:
    """Return a value with paths as text.

    A path without / gets one, because / distinguishes paths from names.
    """
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return os.path.join(".", value)
    return value
