"""The command line: compose, to dataclass, run one stage.

A stage that makes a run prints its folder as the only line on standard output; plan, status and clean print their
table; table and report print the path of index.html. All else goes to standard error.
"""

from __future__ import annotations

from pipeline.runs.stop import UNFINISHED, Stopped, answer_early, handle_signals, handled_signals, stop_signal_name

if __name__ == "__main__":
    answer_early()

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from functools import lru_cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

from pipeline.config import conf
from pipeline.config.compose import (
    Incomplete,
    compose,
    jobs,
    parse,
    spelled_out,
    split_every,
    split_folders,
    usage,
    with_every,
)
from pipeline.config.manual import manual
from pipeline.config.stages import RunStage, Stage, TrainStage
from pipeline.config.words import stage_of
from pipeline.errors import Held, PipelineError
from pipeline.files import ADDED_CONF
from pipeline.hub.addresses import masked_output, without_credentials
from pipeline.launch.in_process import error_sentence, make_single_run
from pipeline.launch.launchers import executor_for
from pipeline.progress import quiet
from pipeline.runs.make import why_not_finished
from pipeline.runs.provenance import DISTRIBUTION, package_version
from pipeline.stages.rows import STUDY_STAGES, build
from pipeline.train.processes import check_launch, end_all, is_follower, launched

STAYS = "finished runs and resume points stay, no other work was published; the same command goes on"


def answer(config: Stage) -> str:
    """What the stage prints: of one that makes a run, its folder."""
    row = STUDY_STAGES.get(config.stage)
    if row:
        return row.answer(config)
    assert isinstance(config, RunStage)
    return str(by_jobs(config) if config.launcher.name == "slurm" else make_single_run(config))


def by_jobs(config: RunStage) -> Path:
    """The folder of a run that jobs have made; Held, with what was submitted, where they have not yet."""
    run = build(config)
    with executor_for(config.launcher, [run]) as execute:
        failed = execute([run])
    if failed:
        raise PipelineError(next(iter(failed.values())))
    return run.folder


@contextmanager
def results_alone_on_stdout() -> Iterator[Callable[[str], None]]:
    """Send what libraries print to standard error, and give the function that prints a result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield partial(write_result, kept)
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def write_result(descriptor: int, text: str) -> None:
    with suppress(BrokenPipeError):  # a reader that has read enough, as head
        os.write(descriptor, (without_credentials(text) + "\n").encode())


def print_answer(config: Stage, result: Callable[[str], None]) -> None:
    told = answer(config)
    if not is_follower():
        result(told)


def run_stage(compose_stage: Callable[[], Any], run: Callable[..., None] = print_answer) -> int:
    """Compose, run, print; every refusal is one sentence and no traceback. Gives the exit status."""
    try:
        config = compose_stage()
        if isinstance(config, TrainStage):
            check_launch(config.sft.processes)
        elif launched() is not None:
            raise PipelineError(f"stage={config.stage} is of one process: start it without torchrun or accelerate")
        with results_alone_on_stdout() as result:
            run(config, result)
    except Held as error:
        print(error, file=sys.stderr)
        return UNFINISHED
    except Exception as error:
        if name := stop_signal_name():  # libraries turn what ends them into errors of their own
            return stopped_by(name)
        refusal = error_sentence(error)
        if refusal is None:
            raise
        if shown := getattr(error, "shown", ""):
            print(shown)
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: {STAYS}", file=sys.stderr)
        return 130
    except SystemExit as ended:
        if isinstance(ended, Stopped):
            return stopped_by(ended.signal_name)
        if ended.code == UNFINISHED and stop_signal_name() == "SIGINT":  # a training has reported where it stopped
            return 130
        return ended.code if isinstance(ended.code, int) else 1
    return 0


def stopped_by(signal_name: str) -> int:
    interrupted = signal_name == "SIGINT"
    print(f"{'interrupted' if interrupted else signal_name}: {STAYS}", file=sys.stderr)
    return 130 if interrupted else UNFINISHED


def multirun(words: list[str]) -> int:
    """`-m`: one stage for each of several values, all composed before the first begins.

    Runs are a plan of one level; their folders are printed. The status is 1 where one failed, else 75 where one is
    unfinished.
    """
    try:
        words, every = split_every(spelled_out(words))
        first, *others = jobs(words)
        configs: list[Any] = [with_every(config, every) for config in (compose(first), *map(composed, others))]
    except PipelineError as error:
        print(f"error: {error_sentence(error)}", file=sys.stderr)
        return 1
    if not all(isinstance(config, RunStage) for config in configs):
        return worst([run_stage(partial(replace, config)) for config in configs])
    statuses: list[int] = []

    def make_all(_: Stage, result: Callable[[str], None]) -> None:
        runs, held = [build(config) for config in configs], None
        try:
            with executor_for(configs[0].launcher, runs) as execute:
                failed = execute(runs)
        except Held as error:
            held, failed = error, error.failed
        for folder in dict.fromkeys(run.folder for run in runs if why_not_finished(run) is None):
            result(str(folder))
        for name, reason in failed.items():
            print(f"error: {name}: {reason}", file=sys.stderr)
        if held is not None:
            print(held, file=sys.stderr)
        statuses.append(1 if failed else UNFINISHED if held else 0)

    return worst([run_stage(lambda: configs[0], make_all), *statuses])


def composed(words: list[str]) -> Stage:
    """As compose, where a thousand commands differ in few options."""
    if any(word.startswith(("+", "~")) or "@" in word.partition("=")[0] for word in words):
        return compose(words)
    return stage_of({one.key_or_group: one.value() for one in map(parsed, words)})


parsed = lru_cache(maxsize=4096)(parse)


def worst(statuses: Iterable[int]) -> int:
    """Of several commands: interrupted, failed, unfinished, done."""
    found = set(statuses)
    return next((status for status in (130, 1, UNFINISHED) if status in found), max(found, default=0))


def show(text: str) -> int:
    """Print text to a reader that may have closed its pipe, as head does; what it has read is enough."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer
    return 0


SHOWS = {  # Hydra's flags that show a command, by what each shows; the first where it is not said
    "--cfg": ("", "job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
SHORT = {"-c": "--cfg", "-i": "--info"}
FLAGS = "--help, --version, -m, --config-dir=DIR, --cfg job (with --resolve: references as values) and --info"


def split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags, each with its value, and the other words.

    Raises:
        PipelineError: a flag that this program has not, or a --cfg without what it shows.
    """
    flags, rest, left = [], [], list(words)
    while left:
        word = left.pop(0)
        flag, _, value = word.partition("=")
        flag = SHORT.get(flag, flag)
        if flag in SHOWS:
            if not value and left and left[0] in SHOWS[flag]:
                value = left.pop(0)
            value = value or SHOWS[flag][0]
            if value not in SHOWS[flag] or not value:
                raise PipelineError(f"{flag} shows one of {', '.join(filter(None, SHOWS[flag]))}: give {flag} VALUE")
            flags += [flag, value]
        elif word == "--resolve":
            flags.append(word)
        elif word in ("-m", "--multirun"):
            raise PipelineError(f"{word} makes a run of each of several values, --cfg and --info show one: drop one")
        elif word.startswith("-"):
            key = flag.lstrip("-")
            instead = f": write {key}=..." if key in (*conf.groups(), "table", "languages", "seed", "runs_dir") else ""
            raise PipelineError(f"{flag} is no flag of this program{instead}; there are {FLAGS}")
        else:
            rest.append(word)
    if "--resolve" in flags and "--cfg" not in flags:
        raise PipelineError("--resolve belongs to --cfg: give --cfg job --resolve")
    return flags, rest


def hydra_flags(words: list[str]) -> int:
    """Hydra's flags --cfg and --info, which show a command and run nothing."""
    import hydra

    try:
        flags, words = split_flags(words)
        words, every = split_every(spelled_out(words))
        with_every(compose(words), every)
    except Incomplete:
        pass
    except PipelineError as error:
        print(f"error: {error_sentence(error)}", file=sys.stderr)
        return 1
    sys.argv = [sys.argv[0], *flags, *words, *conf.searchpath()]
    with redirect_stdout(StringIO()) as shown:
        hydra.main(config_path=str(conf.folder()), config_name="config", version_base="1.3")(lambda config: None)()
    return show(shown.getvalue().rstrip("\n"))


@masked_output()
def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    quiet()
    try:
        words, folders = split_folders(words)
        os.environ.pop(ADDED_CONF, None)
        for folder in folders:
            conf.add(folder)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if {"-h", "--help"} & set(words):
        given = [word for word in words if not word.startswith("-")]
        try:
            return show(manual(given) if given else usage())
        except PipelineError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if "--version" in words:
        print(DISTRIBUTION, package_version(DISTRIBUTION))
        return 0
    with handle_signals():
        flags = {word for word in words if word.startswith("-")}
        if flags and flags <= {"-m", "--multirun"}:
            return multirun([word for word in words if word not in flags])
        if flags:
            return hydra_flags(words)
        return run_stage(lambda: compose(words))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = main()
    for _number in handled_signals():  # all is done: Python's own end takes a while, without handlers
        signal.signal(_number, signal.SIG_IGN)
    end_all(status)
    sys.exit(status)
