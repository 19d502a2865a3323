"""The command line: compose, to dataclass, run one stage.

A stage that makes a run prints its folder as the only line on standard output; plan, status and clean print their
table; table and report print the path of index.html. All else goes to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipeline.config import conf
from pipeline.config.compose import (
    Unreadable,
    compose,
    jobs,
    spelled_out,
    split_every,
    split_folders,
    to_stage,
    usage,
    with_every,
)
from pipeline.config.stages import Stage
from pipeline.errors import PipelineError
from pipeline.files import write_atomically
from pipeline.hub.addresses import without_credentials
from pipeline.study.execute import one, sentence
from pipeline.study.stages import STUDY_STAGES
from pipeline.train.processes import is_follower, launched


def answer(config: Stage) -> str:
    """What the stage prints: of one that makes a run, its folder."""
    row = STUDY_STAGES.get(config.stage)
    return row.answer(config) if row else str(one(config))  # type: ignore[arg-type]


@contextmanager
def results_alone_on_stdout() -> Iterator[Callable[[str], None]]:
    """Send what libraries print to standard error, and give the function that prints a result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield lambda text: (os.write(kept, (text + "\n").encode()), None)[1]
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def run_stage(compose_stage: Callable[[], Any]) -> int:
    """Compose, run, print; every refusal is one sentence and no traceback. Gives the exit status."""
    try:
        config = compose_stage()
        if launched() is not None and config.stage not in ("sft", "cpt"):
            raise PipelineError(f"stage={config.stage} is of one process: start it without torchrun or accelerate")
        with results_alone_on_stdout() as result:
            told = answer(config)
            if not is_follower():
                result(told)
    except Exception as error:
        refusal = sentence(error)
        if refusal is None:
            raise
        if shown := getattr(error, "shown", ""):
            print(without_credentials(shown))
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "interrupted: finished runs stay, the one in work was not published; the same command goes on",
            file=sys.stderr,
        )
        return 130
    return 0


def sweep(words: list[str]) -> int:
    """`-m` and Hydra's other flags: Hydra composes and launches, each job runs one stage.

    Each job of a `-m` is composed once before the first begins, so that a wrong one stops all with one sentence.
    """
    import hydra

    several = bool({"-m", "--multirun"} & set(words))
    asked = [word for word in words if not word.startswith("-") and (several or "=" in word)]
    every: dict[str, Any] = {}
    try:
        words, every = split_every(spelled_out(words))
        asked, _ = split_every(spelled_out(asked))
        for job_words in jobs(asked):
            with_every(compose(job_words), every)
    except PipelineError as error:
        if several or isinstance(error, Unreadable):  # --cfg shows what is incomplete, too
            print(f"error: {sentence(error)}", file=sys.stderr)
            return 1
    states: list[int] = []

    @hydra.main(config_path=str(conf.folder()), config_name="config", version_base="1.3")
    def job(config: Any) -> None:
        if several:
            from hydra.core.hydra_config import HydraConfig

            record = Path(HydraConfig.get().sweep.dir) / "multirun.yaml"  # which Hydra wrote
            write_atomically(
                record, OmegaConf.to_yaml(without_credentials(OmegaConf.to_container(OmegaConf.load(record))))
            )
        states.append(run_stage(lambda: with_every(to_stage(config), every)))

    ours = [word for word in words if "=" in word and not word.startswith("-")]
    flags = [word for word in words if word not in ours]  # Hydra wants them together
    sys.argv = [sys.argv[0], *flags, *ours, *conf.searchpath()]
    job()
    return max(states, default=0)


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    try:
        words, folders = split_folders(words)
        conf.ADDED.clear()
        for folder in folders:
            conf.add(folder)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if {"-h", "--help"} & set(words):
        print(usage())
        return 0
    if "--version" in words:
        from importlib.metadata import version

        print(f"pipeline {version('pipeline')}")
        return 0
    if any(word.startswith("-") for word in words):
        return sweep(words)
    return run_stage(lambda: compose(words))


if __name__ == "__main__":
    sys.exit(main())
