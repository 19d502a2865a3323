"""The one line of progress.

What it says, where it says it, and that nothing else is on standard error.
"""

import errno
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Patch
from lm_eval.api.instance import Instance
from tiny_words import FEW

from pipeline import progress
from pipeline.config.evaluation import Eval
from pipeline.evaluate import score
from pipeline.evaluate.model import open_model
from pipeline.evaluate.store import Answers
from pipeline.progress import Bar, format_duration, say

# --- what it says ---


def test_the_time_left_is_that_of_the_work_left() -> None:
    """10 of 40 were done before, 10 more in 20 s: half a step a second, 40 s for the other 20."""
    bar = Bar("a training", 40, "step")
    bar.start(10)
    bar.start_t -= 20
    bar.update(10)
    bar.set_postfix_str("loss 1.000", refresh=False)
    assert str(bar).startswith("a training: 20/40 [00:20<00:40")
    assert str(bar).endswith("s/step, loss 1.000]")


def test_durations() -> None:
    told = {
        59.4: "59 s",
        59.6: "1:00 min",
        187: "3:07 min",
        3599: "59:59 min",
        3600: "1:00 h",
        93900: "26:05 h",
    }
    assert {seconds: format_duration(seconds) for seconds in told} == told


def test_without_a_terminal_lines_and_no_bar(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run that is over sooner, none."""
    with Bar("short", 2, "row") as bar:
        assert list(bar.over("ab")) == ["a", "b"] and bar.n == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.05)
    with Bar("long", 10, "row") as bar:
        for _ in range(8):
            time.sleep(0.06)
            bar.update()
    told = capsys.readouterr().err
    assert len(told.splitlines()) >= 2 and "\r" not in told and "\033" not in told
    assert all(
        re.fullmatch(r"long: \d/10 \[00:0\d<00:0\d, .*row/s\]", line) for line in told.splitlines()
    )
    time.sleep(0.15)
    assert capsys.readouterr().err == ""  # nothing after its end


def on_screen(written: str) -> list[str]:
    """Return the lines that a terminal shows.

    \\r returns to the first column; ESC[K erases from there to the end.
    """
    lines, column = [""], 0
    for part in re.split(r"(\r\n|\n|\r|\033\[K)", written):
        if part in ("\n", "\r\n"):
            lines.append("")
            column = 0
        elif part == "\r":
            column = 0
        elif part == "\033[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + part + lines[-1][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


def test_a_message_is_above_the_bar_which_stays_at_its_end(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := io.StringIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    with Bar("a training", 2, "step", stays=True) as bar:
        say("loading")
        assert on_screen(terminal.getvalue())[0] == "loading"
        assert on_screen(terminal.getvalue())[1].startswith("a training:   0%|")
        bar.update(2)
    say("done")
    first, second, third, end = on_screen(terminal.getvalue())
    assert (first, third, end) == ("loading", "done", "") and second.startswith("a training: 100%|")


# --- questions ---


class Heard(Bar):
    """A bar that keeps how much was done each time that it was told."""

    def __init__(self) -> None:
        super().__init__("x", 4, "question")
        self.seen: list[float] = []

    def update(self, n: float | None = 1) -> bool | None:
        drawn = super().update(n)
        self.seen.append(self.n)
        return drawn


def requests(kind: Any, asked: list[Any]) -> list[Instance]:
    metadata = [("task", index, 1) for index in range(len(asked))]
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=0, metadata=about)
        for one, about in zip(asked, metadata, strict=True)
    ]


def compute(
    lm: Any, asked: list[Instance], tmp_path: Path, monkeypatch: Patch, shared: bool = False
) -> Any:
    """Show the progress of a model that answers four questions."""
    monkeypatch.setattr(score, "set_sharing", lambda lm, *_: setattr(lm, "share_prefix", shared))
    answers = Answers(tmp_path / "answers", False, {})
    put: Any = score.Asked(None, None, range(4), asked, answers, asked)  # type: ignore[arg-type]
    bar = Heard()
    score.compute(lm, put, Eval(name="x"), bar)
    return bar


@pytest.mark.parametrize("shared", [False, True])
def test_an_answer_is_counted_when_it_ends(
    base: Path, shared: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    lm = open_model(base, 2)
    beginning = "one two three " * 30 if shared else ""
    asked = [
        (f"{beginning}question {index}", {"until": [], "max_gen_toks": 8}) for index in range(4)
    ]
    assert compute(lm, requests("generate_until", asked), tmp_path, monkeypatch, shared).seen == [
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_four_choices_are_one_question(
    base: Path, shared: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    lm = open_model(base, 2)
    beginning = "one two three " * 30 if shared else ""
    asked = [
        (f"{beginning}question {index}", f" {letter}") for index in range(4) for letter in "ABCD"
    ]
    found = requests("loglikelihood", asked)
    for index, request in enumerate(found):
        request.metadata = ("task", index // 4, 1)
        request.__post_init__()
    seen = compute(lm, found, tmp_path, monkeypatch, shared).seen
    assert seen == sorted(seen) and seen[-1] == pytest.approx(4)
    assert len(set(seen)) >= 2  # two prompts a batch


def test_a_whole_text_is_counted_when_it_is_weighed(
    base: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    asked = [(f"one two three question {index}",) for index in range(4)]
    texts = requests("loglikelihood_rolling", asked)
    assert compute(open_model(base, 2), texts, tmp_path, monkeypatch).seen == [1, 2, 3, 4]


# --- the program ---

DONE = r"\[\d+/\d+\] done in [\d.]+ s"
BEGUN = r"\[\d+/\d+\] \S+ \(\w+\), about [\d:]+ (s|min) left in all"
OURS = (
    BEGUN,
    DONE,
    r"",
    r"scores:",
    r"  \S.*",
    r"merge ties: .*",
    r".*: (loading .*|tokenizing [\d,]+ rows)",
    r"sft.seq_length=\d+ truncates .*",
    r"data of math: .*",
    r"\S+: recipe=\S+ mixture=\S+",
    r".*: \d+ of \d+ answers ran out of eval.max_gen_toks=\d+ and were scored unfinished. .*",
)
# rows of a file are counted as they are read
BAR = r"(.+): +(\d+%\|.*\| )?[\d.]+[kM]?(/[\d.]+[kM]?)?(\w+)? \[.*\] *"


@pytest.fixture(scope="module")
def outside() -> dict[str, str]:
    """Return a stranger's environment, in which nothing silences anything."""
    silencing = {*progress.SILENT, "WANDB_SILENT", "TOKENIZERS_PARALLELISM"}
    return {name: value for name, value in os.environ.items() if name not in silencing}


PROGRAM = """
import json, sys
from pipeline.__main__ import main
for words in json.loads(sys.argv[1]):
    print("status", main(words), file=sys.stderr, flush=True)
"""


def ran(commands: list[list[str]], env: dict[str, str], terminal: bool) -> list[str]:
    """Return what commands in one process write to standard error, a terminal or a pipe."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    elsewhere = {"capture_output": True, "text": True, "env": env}
    told = read_terminal(command, env) if terminal else subprocess.run(command, **elsewhere).stderr
    *texts, after = told.split("status 0\n")
    assert not after, told
    return texts


def read_terminal(command: list[str], env: dict[str, str]) -> str:
    """Return what a command writes to a terminal of 300 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 300, 0, 0))
    env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=theirs, stdin=theirs, env=env
    )
    os.close(theirs)
    told = b""
    while True:
        try:
            told += os.read(ours, 65536)
        except OSError as error:  # how Linux says that the other side was closed
            assert error.errno == errno.EIO
            break
    os.close(ours)
    process.wait()
    return told.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def commands(
    world: Path, base: Path, math_expert: Path, language_expert: Path
) -> dict[str, list[str]]:
    start = ["model=trained", f"model.path={base}", f"data_root={world}"]
    asked = ["eval.max_gen_toks=4", "eval.limit=3", f"data_root={world}", "languages=[qac]"]
    return {
        "data": ["stage=data", "expert=math", f"data_root={world}"],
        "sft": ["stage=sft", *start, "expert=math", "recipe=sandbox_math", *FEW],
        "merge": ["stage=merge", "merge=ties", f"merge.experts=[{math_expert},{language_expert}]"],
        "eval": ["stage=eval", f"checkpoint={math_expert}", "eval=sandbox", *asked],
    }


UNITS = {"data": {"row"}, "sft": {"row", "step"}, "merge": {"B"}, "eval": {"question"}}
MADE = {"data": 1, "sft": 2, "merge": 1, "eval": 5}
WITHOUT_A_BAR = {"eval": 1}  # the averages of the four tasks


@pytest.fixture(scope="module")
def shown(
    commands: dict[str, list[str]],
    outside: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[str, str]]:
    """stage -> what a command of it writes at a terminal, and elsewhere."""
    runs_dir = tmp_path_factory.mktemp("shown")

    def told(terminal: bool) -> list[str]:
        more = ["threads=1", "tracking.mode=disabled"]
        folders = [f"runs_dir={runs_dir}/{terminal}/{stage}" for stage in commands]
        asked = [
            [*words, *more, folder]
            for words, folder in zip(commands.values(), folders, strict=True)
        ]
        return ran(asked, outside, terminal)

    with ThreadPoolExecutor() as both:
        return dict(zip(commands, zip(*both.map(told, (True, False)), strict=True), strict=True))


@pytest.mark.parametrize("stage", list(UNITS))
def test_a_run_shows_one_bar_and_nothing_of_libraries(
    stage: str, shown: dict[str, tuple[str, str]]
) -> None:
    at_terminal, elsewhere = shown[stage]
    drawn: list[list[str]] = [[]]  # what was drawn of each run
    done = 0
    for one in filter(None, (part.rstrip() for part in re.split(r"[\r\n]", at_terminal))):
        if re.fullmatch(BAR, one):
            drawn[-1].append(one)
        else:
            assert any(re.fullmatch(ours, one) for ours in OURS), (one, at_terminal)
        if re.fullmatch(DONE, one):
            done += 1
            drawn.append([])
    assert done == MADE[stage]
    assert not drawn.pop()
    assert sum(not of_run for of_run in drawn) == WITHOUT_A_BAR.get(stage, 0)
    assert all(
        len({one.partition(":")[0] for one in of_run}) <= 1 for of_run in drawn
    )  # one bar each
    rates = re.compile(r", +[?\d.]+(?:s/(\w+)|[kMG]?([a-zA-Z]+)/s)")
    units = {"".join(found) for of_run in drawn for one in of_run for found in rates.findall(one)}
    assert units == UNITS[stage]

    assert "\r" not in elsewhere and "\033" not in elsewhere
    for line in elsewhere.splitlines():  # none is drawn of a run of less than 30 seconds
        assert any(re.fullmatch(ours, line) for ours in OURS), (line, elsewhere)


THREADS = """
import sys, threading
from pipeline.progress import Bar, say
sys.setswitchinterval(1e-6)
bar = Bar("a training", 10, "step", stays=True)
bar.update(5)
def redraw():
    for _ in range(300):
        bar.refresh()
def tell(name):
    for number in range(100):
        say(f"message {number} of {name}")
threads = [threading.Thread(target=tell, args=(name,)) for name in "abc"] + [threading.Thread(target=redraw)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
bar.close()
"""


def test_messages_of_other_threads_leave_every_line_whole(outside: dict[str, str]) -> None:
    """Three threads write 300 messages above a bar that is redrawn as often.

    The bar is there at the end.
    """
    *messages, last, _ = on_screen(read_terminal([sys.executable, "-c", THREADS], outside))
    assert sorted(messages) == sorted(
        f"message {number} of {name}" for name in "abc" for number in range(100)
    )
    assert re.fullmatch(r"a training: +50%\|.+\| 5/10 \[.*\]", last)


def test_threads_count_together() -> None:
    bar = Bar("x", 8000, "byte")
    threads = [
        threading.Thread(target=lambda: [bar.update() for _ in range(1000)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bar.n == 8000
