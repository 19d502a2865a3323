"""The command line: compose the configuration, run one stage.

A stage that computes a run prints its folder as the only line on standard output; plan, status and clean print their
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
from functools import partial
from typing import Any

from pipeline.config import conf
from pipeline.config.compose import Incomplete, compose
from pipeline.config.manual import command_text, manual_text, usage_text
from pipeline.config.overrides import chosen_options, refuse_repeated, split_command, split_folders, sweep_jobs
from pipeline.config.stages import RunStage, Stage, TrainStage
from pipeline.errors import Held, PipelineError
from pipeline.files import ADDED_CONF
from pipeline.hub.addresses import masked_output, without_credentials
from pipeline.launch.in_process import error_sentence
from pipeline.launch.launchers import executor_for, stage_output
from pipeline.progress import quiet
from pipeline.runs.make import why_not_finished
from pipeline.runs.provenance import DISTRIBUTION, package_version
from pipeline.stages.rows import build
from pipeline.train.processes import check_launch, is_follower, launched_count

STAYS = "finished runs and resume points stay, no other work was published; rerun the same command to resume"


@contextmanager
def results_alone_on_stdout() -> Iterator[Callable[[str], None]]:
    """Redirect the output of libraries to standard error; yields the function that prints a result."""
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield partial(write_result, stdout_copy)
    finally:
        sys.stdout.flush()
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def write_result(descriptor: int, text: str) -> None:
    with suppress(BrokenPipeError):  # the reader has read enough, as head
        os.write(descriptor, (without_credentials(text) + "\n").encode())


def print_answer(words: Sequence[str], config: Stage, result: Callable[[str], None]) -> None:
    output = stage_output(config, chosen_options(words))
    if not is_follower():
        result(output)


def run_stage(compose_stage: Callable[[], Any], run: Callable[..., None]) -> int:
    """Exit status of composing, running and printing; a PipelineError is printed as one sentence without traceback."""
    try:
        config = compose_stage()
        if isinstance(config, TrainStage):
            check_launch(config.sft.processes)
        elif launched_count() is not None:
            raise PipelineError(f"stage={config.stage} runs in one process: start it without torchrun or accelerate")
        with results_alone_on_stdout() as result:
            run(config, result)
    except Held as error:
        print(error, file=sys.stderr)
        return UNFINISHED
    except Exception as error:
        if name := stop_signal_name():  # libraries convert the signal into errors of their own
            return stopped_by(name)
        sentence = error_sentence(error)
        if sentence is None:
            raise
        if output := getattr(error, "output", ""):
            print(output)
        print(f"error: {sentence}", file=sys.stderr)
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


def run_multirun(words: list[str]) -> int:
    """Exit status of `-m`: one stage for each of several values, all composed before the first begins.

    Runs form a plan of one level; their folders are printed. The status is 1 if any failed, else 75 if any is
    unfinished.
    """
    try:
        configs: list[Any] = [compose(job) for job in sweep_jobs(words)]
    except PipelineError as error:
        print(f"error: {error_sentence(error)}", file=sys.stderr)
        return 1
    if not all(isinstance(config, RunStage) for config in configs):
        return worst_status([run_stage(partial(replace, config), partial(print_answer, words)) for config in configs])
    statuses: list[int] = []

    def make_all(_: Stage, result: Callable[[str], None]) -> None:
        runs, lease_error = [build(config) for config in configs], None
        try:
            with executor_for(configs[0].launcher, runs) as execute:
                failed = execute(runs)
        except Held as error:
            lease_error, failed = error, error.failed
        for folder in dict.fromkeys(run.folder for run in runs if why_not_finished(run) is None):
            result(str(folder))
        for name, reason in failed.items():
            print(f"error: {name}: {reason}", file=sys.stderr)
        if lease_error is not None:
            print(lease_error, file=sys.stderr)
        statuses.append(1 if failed else UNFINISHED if lease_error else 0)

    return worst_status([run_stage(lambda: configs[0], make_all), *statuses])


def worst_status(statuses: Iterable[int]) -> int:
    """The most severe exit status: 130 (interrupted), 1 (failed), 75 (unfinished), 0 (done)."""
    distinct = set(statuses)
    return next((status for status in (130, 1, UNFINISHED) if status in distinct), max(distinct, default=0))


def print_text(text: str) -> int:
    """Print text, ignoring a closed pipe, as with head; returns exit status 0."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the rest of the buffer
    return 0


FLAGS = "--help, --version, -m, --config-dir=DIR and --cfg job"


def without_flags(words: Sequence[str]) -> list[str]:
    """The overrides of a command that is only shown, without --cfg job.

    Raises:
        PipelineError: an unknown flag, or --cfg with another value.
    """
    overrides, remaining = [], list(words)
    while remaining:
        word = remaining.pop(0)
        flag, _, value = word.partition("=")
        if flag in ("--cfg", "-c"):
            value = value or (remaining.pop(0) if remaining and "=" not in remaining[0] else "")
            if value != "job":
                raise PipelineError("--cfg shows a command's values: give --cfg job")
        elif word in ("-m", "--multirun"):
            raise PipelineError(f"{word} starts a run for each of several values, --cfg shows one: drop one")
        elif word.startswith("-"):
            key = flag.lstrip("-")
            instead = f": write {key}=..." if key in (*conf.groups(), "table", "languages", "seed", "runs_dir") else ""
            raise PipelineError(f"{flag} is not a flag of this program{instead}; there are {FLAGS}")
        else:
            overrides.append(word)
    return overrides


def show_values(words: list[str]) -> int:
    """Exit status of --cfg job, which shows a command's values and runs nothing."""
    try:
        words = without_flags(words)
        with suppress(Incomplete):
            compose(split_command(words)[1] or words)
        return print_text(command_text(words))
    except PipelineError as error:
        print(f"error: {error_sentence(error)}", file=sys.stderr)
        return 1


@masked_output()
def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    quiet()
    try:
        words, folders = split_folders(words)
        os.environ.pop(ADDED_CONF, None)
        for folder in folders:
            conf.add_folder(folder)
        refuse_repeated(words)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if {"-h", "--help"} & set(words):
        overrides = [word for word in words if not word.startswith("-")]
        try:
            return print_text(manual_text(overrides) if overrides else usage_text())
        except PipelineError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if "--version" in words:
        print(DISTRIBUTION, package_version(DISTRIBUTION))
        return 0
    with handle_signals():
        flags = {word for word in words if word.startswith("-")}
        if flags and flags <= {"-m", "--multirun"}:
            return run_multirun([word for word in words if word not in flags])
        if flags:
            return show_values(words)
        return run_stage(lambda: compose(words), partial(print_answer, words))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = main()
    for _number in handled_signals():  # finished: Python's shutdown takes a while and has no handlers
        signal.signal(_number, signal.SIG_IGN)
    sys.exit(status)
