"""Programs that a model wrote: what passes, what fails, and what they cannot do."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up import Scripted, asked, choice, none_stored, problem, write_rows

from pipeline.errors import PipelineError
from pipeline.evaluate import code_eval
from pipeline.evaluate.prompts import load_tasks
from pipeline.evaluate.score import score_tasks
from pipeline.evaluate.tasks import task_specs
from pipeline.hub.lock import Lock


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ('if __name__ == "__main__":\n    input()', "passed"),
        ("def f(n): return n + 1\nassert f(1) == 2", "passed"),
        (
            (
                "import re, math, heapq, collections, itertools, json, random, datetime\nassert"
                " math.gcd(4, 6) == 2"
            ),
            "passed",
        ),
        ("print('x' * 10**6)", "passed"),
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("raise type('what it read', (Exception,), {})()", "Exception"),  # no way to tell anything
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "killed"),  # leaving early is not passing
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError"),
        ("import ctypes\nctypes.string_at(0)", "killed"),
        ("bytearray(2**31)", "MemoryError"),
        ("while True: pass", "timed out"),
        ("import time\ntime.sleep(100)", "timed out"),
        (
            "import os\nwhile True: os.write(4, b'x' * 1000)",
            "timed out",
        ),  # its way to the parent is full
        ("open('/escaped', 'w')", "PermissionError"),
        ("import os\nos.mkdir('/escaped')", "PermissionError"),
        ("import os\nos.remove(os.__file__)", "PermissionError"),
        ("import os\nos.truncate(os.__file__, 0)", "PermissionError"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 1))", "PermissionError"),
        ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
        ("import os\nos.fork()", "PermissionError"),
        ("import os\nos.kill(os.getppid(), 0)", "PermissionError"),
    ],
)
def test_what_comes_of_a_program(
    program: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_eval, "GRACE", 2)
    begun = time.monotonic()
    assert str(code_eval.run_program(program, seconds=1)) == outcome
    assert time.monotonic() - begun < 20
    assert not Path("/escaped").exists()


EVERY_PIPE = """
import os
for pipe in range(3, 32):
    try:
        os.write(pipe, LINE)
    except OSError:
        pass
os._exit(CODE)
"""


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("raise type('passed', (Exception,), {'__module__': 'builtins'})", "Exception"),
        ("raise type('x passed', (Exception,), {'__module__': 'builtins'})", "Exception"),
        (
            "class Odd(type):\n    __name__ = 1 / 0\nraise Odd('passed', (Exception,), {})",
            "ZeroDivisionError",
        ),
        (EVERY_PIPE.replace("LINE", "b'passed'").replace("CODE", "0"), "killed"),
        (EVERY_PIPE.replace("LINE", "b'0' * 32 + b' passed'").replace("CODE", "0"), "killed"),
        (EVERY_PIPE.replace("LINE", "b'not confined: no seccomp'").replace("CODE", "1"), "killed"),
        (
            EVERY_PIPE.replace("LINE", "b'0' * 32 + b' unconfined no seccomp'").replace(
                "CODE", "1"
            ),
            "killed",
        ),
        (EVERY_PIPE.replace("LINE", "bytes(range(256))").replace("os._exit(CODE)", ""), "killed"),
        ("print('passed')\nraise SystemExit(0)", "SystemExit"),
        ("import os\nos._exit = os.write = os.read = None\nassert False", "AssertionError"),
    ],
)
def test_a_pass_is_not_for_the_taking(program: str, outcome: str) -> None:
    assert str(code_eval.run_program(program)) == outcome


def test_no_frame_or_object_holds_what_a_pass_takes() -> None:
    """The program sends any 32 hexadecimal digits that it finds as a possible pass.

    It looks in frames first.
    """
    program = """
import gc, os, re, sys
def send(held):
    for one in held:
        text = one.decode(errors="replace") if isinstance(one, bytes) else one
        for nonce in re.findall("[0-9a-f]{32}", text) if isinstance(text, str) else []:
            for pipe in range(3, 32):
                try:
                    os.write(pipe, (nonce + ENDING).encode())
                except OSError:
                    continue
                os._exit(0)
frame, values = sys._getframe(), []
while frame:
    values += [*frame.f_locals.values(), *frame.f_globals.values()]
    frame = frame.f_back
send(values)
for one in gc.get_objects():
    send(one if isinstance(one, (tuple, list)) else list(one.values()) if isinstance(one, dict) else [])
"""
    for ending in ("''", "' passed'"):
        assert (
            code_eval.run_program(program.replace("ENDING", ending) + "raise KeyError") != "passed"
        )


def test_the_outcome_is_decided_by_how_the_process_ended() -> None:
    def of(status: int, line: str) -> str:
        return repr(code_eval.outcome_of(status, line.encode(), "nonce"))

    passed, killed = repr("passed"), repr("killed")
    assert of(0, "nonce passed") == passed
    assert [
        of(1, "nonce passed"),
        of(-9, "nonce passed"),
        of(0, "other passed"),
        of(0, "passed"),
    ] == [killed] * 4
    assert [
        of(0, "nonce passed twice"),
        of(0, "nonce raised KeyError"),
        of(0, ""),
        of(1, "nonce"),
    ] == [killed] * 4
    assert of(1, "nonce raised KeyError") == repr("KeyError")
    for name in (
        "passed",
        "print",
        "__doc__",
        "Exception\nsecret",
        "wandb0123456789",
    ):  # no built-in exceptions
        assert of(1, f"nonce raised {name}") == repr("Exception")
    assert of(-signal.SIGXCPU, "") == repr("timed out")
    assert of(1, "nonce unconfined no Landlock") == repr("not confined: no Landlock")


def test_a_program_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    program = "import os\nassert not os.environ.get('SOME_TOKEN')\nassert os.getcwd() == '/'"
    assert code_eval.run_program(program) == "passed"


# Raises an error named after the key, where any process' environment shows one.
STEAL = """
import glob, re
there = []
for file in ["/proc/self/environ", *glob.glob("/proc/[0-9]*/environ")]:
    try:
        there += re.findall(b"WANDB_API_KEY=([a-z0-9]+)", open(file, "rb").read())
    except OSError as error:
        refused = error
if not there:
    raise refused
raise type(there[0].decode(), (Exception,), {"__module__": "builtins"})
"""


@pytest.fixture
def no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine where nobody is logged in anywhere."""
    for name in list(os.environ):
        if code_eval._SECRET.search(name) or name in (
            "NETRC",
            "HF_HOME",
            "XDG_CACHE_HOME",
            "HF_TOKEN_PATH",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("no_secrets")
def test_a_key_of_the_parent_never_comes_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With Landlock it is out of reach; without, nothing is run beside it.

    Either is this kernel's.
    """
    monkeypatch.setenv("WANDB_API_KEY", "key0123456789")
    holder = subprocess.Popen(["sleep", "60"])  # has the key from its start, as this process would
    netrc = tmp_path / "a file"
    netrc.write_text("password key0123456789")
    try:
        stolen, read = (
            code_eval.run_program(STEAL),
            code_eval.run_program(f"open({str(netrc)!r}).read()"),
        )
    finally:
        holder.kill()
        holder.wait()
    assert "key0123456789" not in repr(stolen)
    if code_eval.has_landlock():
        assert str(stolen) == str(read) == "PermissionError"
        assert str(code_eval.run_program("import os\nos.listdir('/proc')")) == "PermissionError"
        code_eval.check_confinement()
    else:
        with pytest.raises(PipelineError, match="no Landlock, .* could read WANDB_API_KEY"):
            code_eval.check_confinement()


@pytest.fixture
def without_landlock(monkeypatch: pytest.MonkeyPatch, no_secrets: None) -> None:
    monkeypatch.setattr(code_eval, "has_landlock", lambda: False)


def in_environment(name: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    return lambda monkeypatch, home: monkeypatch.setenv(name, "0123456789")


def in_file(name: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    def write(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("secret")

    return write


@pytest.mark.usefixtures("without_landlock")
@pytest.mark.parametrize(
    ("put", "named"),
    [
        (in_environment("WANDB_API_KEY"), "WANDB_API_KEY"),
        (in_environment("HF_TOKEN"), "HF_TOKEN"),
        (in_environment("HUGGING_FACE_HUB_TOKEN"), "HUGGING_FACE_HUB_TOKEN"),
        (in_environment("AWS_SECRET_ACCESS_KEY"), "AWS_SECRET_ACCESS_KEY"),
        (in_environment("db_password"), "db_password"),
        (in_file(".netrc"), "~/.netrc"),
        (in_file(".cache/huggingface/token"), "~/.cache/huggingface/token"),
    ],
)
def test_without_landlock_nothing_runs_beside_a_secret(
    put: Callable[[pytest.MonkeyPatch, Path], None],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    put(monkeypatch, tmp_path)
    with pytest.raises(
        PipelineError, match=f"no Landlock, .* could read {named}. Remove"
    ) as refused:
        code_eval.check_confinement()
    assert "0123456789" not in str(refused.value)


@pytest.mark.usefixtures("without_landlock")
def test_without_landlock_and_secrets_programs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    code_eval.check_confinement()
    assert code_eval.run_program("assert open('/proc/self/environ').read() == ''") == "passed"


@pytest.mark.usefixtures("without_landlock")
def test_a_program_of_root_has_no_capabilities(tmp_path: Path) -> None:
    """Files that only a capability opens, not even their owner.

    On a user's account nobody opens them anyway.
    """
    closed = tmp_path / "closed"
    closed.write_text("secret")
    closed.chmod(0)
    assert str(code_eval.run_program(f"open({str(closed)!r})")) == "PermissionError"


@pytest.mark.usefixtures("no_secrets")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (('"x86_64"', '"another processor"'), "x86-64"),
        (("= 444, 445", "= 9444, 445"), "no Landlock"),
    ],
    ids=["processor", "kernel"],
)
def test_where_programs_cannot_be_confined_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: tuple[str, str], reason: str
) -> None:
    monkeypatch.setattr(code_eval, "has_landlock", lambda: reason == "no Landlock")
    child = tmp_path / "confined.py"
    child.write_text(Path(code_eval.__file__).with_name("confined.py").read_text().replace(*change))
    monkeypatch.setattr(code_eval, "__file__", str(tmp_path / "code_eval.py"))
    assert code_eval.run_program("1").startswith("not confined: ")
    with pytest.raises(PipelineError, match=rf"programs cannot be confined .* \(.*{reason}"):
        code_eval.check_confinement()


def test_what_dies_or_babbles_is_one_failed_problem() -> None:
    forged = EVERY_PIPE.replace("LINE", "b'not confined: x'").replace("CODE", "1")
    odd = ["import os\nos.abort()", forged, "\0", "\ud800", "x" * 10**6, "def f(): return 1"]
    found = code_eval.outcomes(
        [[one] for one in odd], [{"test_list": ["assert f() == 1"]}] * len(odd)
    )
    kinds = ["killed", "killed", "SyntaxError", "SyntaxError", "NameError", "passed"]
    assert [str(one) for one in found] == kinds
    assert [code_eval.passed({}, [one])["pass_at_1"] for one in found] == [0.0] * 5 + [1.0]


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("import time\nwhile time.process_time() < 1.5: pass", "passed"),
        ("import time\ntime.sleep(100)", "timed out"),
        ("while True: pass", "timed out"),
    ],
)
def test_a_program_is_limited_by_its_computing_time(
    program: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little of a core it gets, here by a clock that stands for one: 0.2 seconds."""
    monkeypatch.setattr(code_eval, "GRACE", -2.8)
    assert str(code_eval.run_program(program, seconds=3)) == outcome


def test_pass_at_1_by_hand(tmp_path: Path) -> None:
    """Four answers: right, right in a fence, wrong, no program."""
    root = tmp_path / "data"
    write_rows(root / "mbpp/sw/test.jsonl", [problem(number) for number in range(4)])
    right = "def add(a, b):\n    return a + b\n"
    answers = [
        right + "[DONE] more",
        f"Here:\n```python\n{right}```\nas asked",
        "def add(a, b): return 9",
        "I cannot.",
    ]

    def answer(prompt: str) -> str:
        return answers[int(prompt.split("Add ")[1][0])]

    definitions = task_specs(
        choice(asked("mbpp", 0), run_code=True), ["sw"], root, tmp_path / "tasks"
    )
    lm = Scripted(answer)
    scores = score_tasks(
        lm,
        definitions,
        load_tasks(definitions, Lock()),
        choice(asked("mbpp", 0)),
        none_stored(tmp_path),
    )
    row = scores.rows[0]
    assert (row.metric, row.filter, row.value, row.n) == ("pass_at_1", "tests", 0.5, 4)
    samples = scores.samples["mbpp_sw_0shot"]
    assert [sample["extracted"] for sample in samples] == [
        "passed",
        "passed",
        "AssertionError",
        "SyntaxError",
    ]
    assert [sample["correct"] for sample in samples] == [True, True, False, False]
    assert (
        lm.prompts[1]
        == "You are an expert Python programmer, and here is your task: Add 1. Your code should"
        " pass these tests:\n\nassert add(0, 1) == 1\nassert add(1, 1) == 2\nassert add(2, 1) =="
        " 3\n[BEGIN]\n"
    )
