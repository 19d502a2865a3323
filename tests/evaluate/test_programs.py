"""Programs that a model wrote: what passes, what fails, and what they cannot do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from made_up import Scripted, asked, choice, problem, write_rows

from pipeline.evaluate import harness, programs
from pipeline.evaluate.definitions import task_definitions
from pipeline.knobs import PipelineError


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("def f(n): return n + 1\nassert f(1) == 2", "passed"),
        (
            "import re, math, heapq, collections, itertools, json, random, datetime\nassert math.gcd(4, 6) == 2",
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
        ("while True: pass", "killed"),
        ("import time\ntime.sleep(100)", "timed out"),
        ("import os\nwhile True: os.write(3, b'x' * 1000)", "timed out"),
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
def test_what_comes_of_a_program(program: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "GRACE", 2)
    begun = time.monotonic()
    assert programs.run(program, seconds=1) == outcome
    assert time.monotonic() - begun < 20
    assert not Path("/escaped").exists()


def test_a_program_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    assert programs.run("import os\nassert not os.environ.get('SOME_TOKEN')\nassert os.getcwd() == '/'") == "passed"


def test_confinement_is_tried_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    programs.check_confinement()
    monkeypatch.setattr(programs, "run", lambda program, *_: "passed")
    with pytest.raises(PipelineError, match="could reach the network, write files, .* on this machine"):
        programs.check_confinement()


def test_where_programs_cannot_be_confined_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "confined.py"
    source = Path(programs.__file__).with_name("confined.py").read_text()
    child.write_text(source.replace('"x86_64"', '"another processor"'))
    monkeypatch.setattr(programs, "__file__", str(tmp_path / "programs.py"))
    with pytest.raises(PipelineError, match=r"cannot be confined here \(not confined: .*x86-64\)"):
        programs.run("1")


def test_pass_at_1_by_hand(tmp_path: Path) -> None:
    """Four answers: right, right in a fence, wrong, no program."""
    root = tmp_path / "data"
    write_rows(root / "mbpp/sw/test.jsonl", [problem(number) for number in range(4)])
    right = "def add(a, b):\n    return a + b\n"
    answers = [right + "[DONE] more", f"Here:\n```python\n{right}```\nas asked", "def add(a, b): return 9", "I cannot."]

    def answer(prompt: str) -> str:
        return answers[int(prompt.split("Add ")[1][0])]

    definitions = task_definitions([asked("mbpp", 0)], ["sw"], root, tmp_path / "tasks", run_code=True)
    lm = Scripted(answer)
    scores = harness.score(lambda: lm, definitions, harness.load_tasks(definitions), choice(asked("mbpp", 0)))
    row = scores.rows[0]
    assert (row["metric"], row["filter"], row["value"], row["n"]) == ("pass_at_1", "tests", 0.5, 4)
    samples = scores.samples["mbpp_sw_0shot"]
    assert [sample["extracted"] for sample in samples] == ["passed", "passed", "AssertionError", "SyntaxError"]
    assert [sample["correct"] for sample in samples] == [True, True, False, False]
    assert lm.prompts[1] == (
        "You are an expert Python programmer, and here is your task: Add 1. Your code should pass these tests:\n\n"
        "assert add(0, 1) == 1\nassert add(1, 1) == 2\nassert add(2, 1) == 3\n[BEGIN]\n"
    )


@pytest.mark.parametrize(
    ("shots", "data", "run_code", "message"),
    [
        (0, True, False, "allow it with eval.run_code=true, or leave mbpp out"),
        (3, True, True, "asked without exemplars: num_fewshot=0, not 3"),
        (0, False, True, "mbpp has no translation into Swahili on the hub: set data_root"),
    ],
)
def test_mbpp_is_refused(tmp_path: Path, shots: int, data: bool, run_code: bool, message: str) -> None:
    write_rows(tmp_path / "mbpp/sw/test.jsonl", [problem(0)])
    with pytest.raises(PipelineError, match=message):
        root = tmp_path if data else None
        task_definitions([asked("mbpp", shots)], ["sw"], root, tmp_path / "tasks", run_code=run_code)


def test_three_tests_are_needed(tmp_path: Path) -> None:
    write_rows(tmp_path / "mbpp/sw/test.jsonl", [problem(0) | {"test_list": ["assert 1"]}])
    with pytest.raises(PipelineError, match="test_list must hold three tests"):
        task_definitions([asked("mbpp", 0)], ["sw"], tmp_path, tmp_path / "tasks", run_code=True)
