"""The command line: compose, to dataclass, run one stage.

A stage that makes a run prints its folder as the only line on standard output; plan and status print their table; table
and report print the path of index.html. All else goes to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.compose import compose, conf_dir, parse, register, to_stage
from pipeline.config import PipelineError, RunStage, StatusStage, TableStage


def make_one(config: RunStage) -> str:
    from pipeline.study.plan import one

    return str(one(config))


def plan(config: TableStage) -> str:
    from pipeline.study.plan import ordered, show, study

    return show(ordered(study(config).targets))


def table(config: TableStage) -> str:
    from pipeline.report.study import make_table

    return str(make_table(config))


def report(config: TableStage) -> str:
    from pipeline.report.study import report_table

    return str(report_table(config))


def status(config: StatusStage) -> str:
    from pipeline.report.study import show_status

    return show_status(config)


STAGES: dict[str, Callable[[Any], str]] = {
    "data": make_one, "cpt": make_one, "sft": make_one, "merge": make_one, "eval": make_one,
    "plan": plan, "table": table, "report": report, "status": status,
}  # fmt: skip


@contextmanager
def results_alone_on_stdout() -> Iterator[Callable[[str], None]]:
    """Send what libraries print to standard error, and give the function that prints a result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield lambda text: (os.write(kept, (text + "\n").encode()), None)[1]
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def run_stage(compose_stage: Callable[[], Any]) -> int:
    """Compose, run, print; every refusal is one sentence and no traceback. Gives the exit status."""
    try:
        config = compose_stage()
        with results_alone_on_stdout() as result:
            result(STAGES[config.stage](config))
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno is None:
            raise
        print(f"error: {error.strerror}: {error.filename or 'no file named'}; nothing was published", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: finished runs stay, the one in work was not published; the same command goes on", file=sys.stderr)
        return 130
    return 0


def sweep(words: list[str]) -> int:
    """`-m` and Hydra's other flags: Hydra composes and launches, each job runs one stage."""
    import hydra

    register()
    states: list[int] = []

    @hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")
    def job(config: Any) -> None:
        states.append(run_stage(lambda: to_stage(config)))

    sys.argv = [sys.argv[0], *words]
    job()
    return max(states, default=0)


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if any(word.startswith("-") for word in words):
        return sweep(words)

    def composed() -> Any:
        parse(words)
        return compose(words)

    return run_stage(composed)


if __name__ == "__main__":
    sys.exit(main())
