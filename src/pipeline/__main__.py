"""The command line: composes the configuration and runs one stage.

A stage that computes a run prints its folder as the only line on standard output. plan, status and
clean print their table; table and report print the path of index.html. Everything else goes to
standard error.
"""

from __future__ import annotations

import os
import sys

if (
    __name__ == "__main__" and sys.path[0] == os.getcwd()
):  # with python -m, a file in the working directory could replace a library
    del sys.path[0]

from pipeline.runs.stop import (
    UNFINISHED,
    Stopped,
    answer_early,
    handle_signals,
    handled_signals,
    stop_signal_name,
)

if __name__ == "__main__":
    answer_early()

import signal
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from typing import Any, NoReturn

from pipeline.config import conf
from pipeline.config.compose import Incomplete, compose
from pipeline.config.manual import command_text, manual_text, usage_text
from pipeline.config.overrides import chosen_options, refuse_repeated, split_command, sweep_jobs
from pipeline.config.stages import RunStage, Stage, TrainStage
from pipeline.errors import Held, PipelineError
from pipeline.files import ADDED_CONF
from pipeline.hub.addresses import masked_output, without_credentials
from pipeline.launch.in_process import error_sentence
from pipeline.launch.launchers import executor_for, stage_output
from pipeline.progress import quiet, redirected
from pipeline.runs.make import why_not_finished
from pipeline.runs.provenance import DISTRIBUTION, package_version
from pipeline.stages.rows import build
from pipeline.text import printable
from pipeline.train.processes import check_launch, is_follower, launched_count

STAYS = (
    "finished runs and resume points stay, no other work was published; rerun the same command to"
    " resume"
)


@contextmanager
def results_alone_on_stdout() -> Iterator[Callable[[str], None]]:
    """Redirect the output of libraries to standard error.

    Yields the function that prints a result.
    """
    sys.stdout.flush()
    with (
        os.fdopen(os.dup(1), "wb", buffering=0) as results,
        redirected(2, 1),
        redirect_stdout(sys.stderr),
    ):
        yield partial(write_result, results.fileno())


def write_result(descriptor: int, text: str) -> None:
    with suppress(BrokenPipeError):  # the reader has read enough, like `head`
        os.write(descriptor, (printable(without_credentials(text)) + "\n").encode())


def print_answer(arguments: Sequence[str], config: Stage, result: Callable[[str], None]) -> None:
    output = stage_output(config, chosen_options(arguments))
    if not is_follower():
        result(output)


def run_stage(compose_stage: Callable[[], Any], run: Callable[..., None]) -> int:
    """Compose, run and print a stage, and return the exit status.

    A PipelineError is printed as one sentence without a traceback.
    """
    try:
        config = compose_stage()
        if isinstance(config, TrainStage):
            check_launch(config.sft.processes)
        elif launched_count() is not None:
            raise PipelineError(
                f"stage={config.stage} runs in one process. Start it without torchrun or"
                " accelerate."
            )
        with results_alone_on_stdout() as result:
            run(config, result)
    except Held as error:
        print(error, file=sys.stderr)
        return UNFINISHED
    except Exception as error:
        if name := stop_signal_name():  # libraries replace the signal by other errors
            return stopped_by(name)
        sentence = error_sentence(error)
        if sentence is None:
            raise
        output = getattr(error, "output", "")
        if output:
            write_result(1, output)
        print(f"error: {sentence}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: {STAYS}", file=sys.stderr)
        return 130
    except SystemExit as ended:
        if isinstance(ended, Stopped):
            return stopped_by(ended.signal_name)
        if (
            ended.code == UNFINISHED and stop_signal_name() == "SIGINT"
        ):  # a training has reported where it stopped
            return 130
        if isinstance(ended.code, int):
            return ended.code
        return 1
    return 0


def stopped_by(signal_name: str) -> int:
    interrupted = signal_name == "SIGINT"
    print(f"{'interrupted' if interrupted else signal_name}: {STAYS}", file=sys.stderr)
    if interrupted:
        return 130
    return UNFINISHED


def run_multirun(arguments: list[str]) -> int:
    """Run one stage for each of several values (-m), and return the exit status.

    All values are composed before the first run begins. The runs form a plan of one level, and
    their folders are printed. The status is 1 if a run failed, and otherwise 75 if a run is
    unfinished.
    """
    try:
        configs: list[Any] = [compose(job) for job in sweep_jobs(arguments)]
        for config in configs:
            if not isinstance(config, RunStage):
                raise PipelineError(
                    f"-m starts runs, but stage={config.stage} computes none. Give the command once"
                    " for each value."
                )
    except PipelineError as error:
        print(f"error: {error_sentence(error)}", file=sys.stderr)
        return 1
    return run_stage(lambda: configs[0], partial(make_all, configs))


def make_all(configs: Sequence[Any], _: Stage, result: Callable[[str], None]) -> None:
    """Compute the runs of several configurations, and print the folders of the finished runs.

    Raises:
        PipelineError: runs failed. It has the reasons.
        Held: no run failed, but runs are unfinished.
    """
    runs, held = [build(config) for config in configs], None
    try:
        with executor_for(configs[0].launcher, runs) as execute:
            failed = execute(runs)
    except Held as error:
        held, failed = error, error.failed
    for folder in dict.fromkeys(run.folder for run in runs if why_not_finished(run) is None):
        result(str(folder))
    if failed:
        raise PipelineError(*[f"{name}: {reason}" for name, reason in failed.items()])
    if held:
        raise held


def print_text(text: str) -> int:
    """Print text and return exit status 0.

    A closed pipe, as with `head`, is ignored.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the rest of the buffer
    return 0


FLAGS = "--help, --version, -m, --config-dir=DIR and --cfg job"


class Flags(ArgumentParser):
    """The flags of a command. Unknown words are left to its overrides."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("-h", "--help", action="store_true")
        self.add_argument("--version", action="store_true")
        self.add_argument("-m", "--multirun", action="store_true")
        self.add_argument("-cd", "--config-dir", action="append", default=[])
        self.add_argument("-c", "--cfg", nargs="?", const="")

    def error(self, message: str) -> NoReturn:
        without = "--config-dir" in message and "expected" in message
        raise PipelineError(
            "--config-dir needs a folder. Write --config-dir=DIR."
            if without
            else f"{message}. The flags are {FLAGS}."
        )


def refuse_flags(flags: Namespace, arguments: Sequence[str]) -> None:
    """Check that flags are known and fit together.

    Raises:
        PipelineError: a flag is unknown, or two flags exclude each other.
    """
    if flags.cfg is not None and flags.multirun:
        raise PipelineError(
            "-m starts a run for each of several values, but --cfg shows one. Remove one of the"
            " flags."
        )
    if flags.cfg not in (None, "job"):
        raise PipelineError("--cfg shows the values of a command. Write --cfg job.")
    for argument in arguments:
        if argument.startswith("-"):
            flag = argument.partition("=")[0]
            raise PipelineError(
                f"{flag} is not a flag of this program. The flags are {FLAGS}. Write options as"
                " KEY=VALUE."
            )


def show_values(arguments: list[str]) -> int:
    """Show the values of a command (--cfg job), and return the exit status.

    The values are those of its run if all parents are known. No run is computed.
    """
    resolved = None
    try:
        with suppress(Incomplete):
            config = compose(split_command(arguments)[1] or arguments)
            with suppress(PipelineError):
                resolved = None
                if isinstance(config, RunStage):
                    resolved = build(config).config
        return print_text(command_text(arguments, resolved))
    except PipelineError as error:
        print(f"error: {error_sentence(error)}", file=sys.stderr)
        return 1


@masked_output()
def main(arguments: list[str] | None = None) -> int:
    if arguments is None:
        arguments = sys.argv[1:]
    if sys.stdout is None:
        print(
            "error: standard output is closed. Redirect it to a file, or to /dev/null.",
            file=sys.stderr,
        )
        return 1
    quiet()
    try:
        flags, arguments = Flags().parse_known_args(arguments)
        os.environ.pop(ADDED_CONF, None)
        for folder in flags.config_dir:
            conf.add_folder(folder)
        refuse_repeated(arguments)
        if flags.help:
            overrides = []
            for argument in arguments:
                if not argument.startswith("-"):
                    overrides.append(argument)
            return print_text(manual_text(overrides) if overrides else usage_text())
        if flags.version:
            return print_text(f"{DISTRIBUTION} {package_version(DISTRIBUTION)}")
        refuse_flags(flags, arguments)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with handle_signals():
        if flags.cfg:
            return show_values(arguments)
        if flags.multirun:
            return run_multirun(arguments)
        return run_stage(lambda: compose(arguments), partial(print_answer, arguments))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = main()
    for _number in handled_signals():  # Python's shutdown takes long and has no signal handlers
        signal.signal(_number, signal.SIG_IGN)
    sys.exit(status)
