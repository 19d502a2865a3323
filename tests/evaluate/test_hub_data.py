"""Benchmarks on the Hub where it does not answer: refused at once, or taken from the cache."""

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import forked
import pytest
from huggingface_hub import constants
from made_up import asked, choice, worked

from pipeline.config.evaluation import Eval, EvalTask
from pipeline.config.stages import EvalStage
from pipeline.errors import PipelineError
from pipeline.evaluate.prompts import load_tasks
from pipeline.evaluate.tasks import task_specs
from pipeline.hub import reach
from pipeline.hub.lock import Lock
from pipeline.stages.hub_inputs import evaluated_sets

EVALUATION = """
import sys
from pathlib import Path
from pipeline.config.evaluation import Eval, EvalTask
from pipeline.errors import PipelineError
from pipeline.evaluate.prompts import load_tasks
from pipeline.evaluate.tasks import task_specs
from pipeline.hub.lock import Lock

tasks = [EvalTask("mgsm", 2), EvalTask("belebele", 0)]
try:
    load_tasks(task_specs(Eval("", tasks), ["en", "sw"], None, Path(sys.argv[1])), Lock())
except PipelineError as error:
    print(error)
"""


def test_a_hub_that_gives_nothing_is_asked_once(tmp_path: Path) -> None:
    asked_for: list[str] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked_for.append(f"{self.command} {self.path}")
            self.send_error(503)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hub"),
    }
    where |= {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    try:
        done = forked.python("-c", EVALUATION, str(tmp_path / ".work"), env=os.environ | where)
    finally:
        server.shutdown()
        server.server_close()
    assert [one for one in asked_for if "mgsm" in one or "belebele" in one] == [
        "GET /api/datasets/juletxara/mgsm"
    ]
    assert "Retry" not in done.stderr
    assert done.stdout.startswith("The data of mgsm_en_2shot cannot be read (juletxara/mgsm: ")
    told = (
        "Run stage=prefetch on a node that reaches the Hub, log in if the set is gated, or set"
        " data_root to a folder that has it.\n"
    )
    assert done.stdout.endswith(told)
    assert "503" in done.stdout and ".work" not in done.stdout and done.stdout.count("\n") == 1


def test_what_is_in_the_cache_is_read_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache stands for what stage=prefetch left.

    Read with `datasets` offline, which then asks nobody.
    """
    rows = [worked(f"Question: {i}?", f"Step-by-Step Answer: So. {i}.", i) for i in range(2)]
    asked_for = []

    def load_dataset(path: str, name: str, **_: Any) -> Any:
        assert datasets.config.HF_HUB_OFFLINE and constants.HF_HUB_OFFLINE
        return datasets.DatasetDict(
            {split: datasets.Dataset.from_list(rows) for split in ("train", "test")}
        )

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    refusal = OSError("no route to it")
    monkeypatch.setattr(
        reach, "refusal_of_set", lambda repository: asked_for.append(repository) or refusal
    )
    definitions = task_specs(choice(asked("mgsm", 2)), ["en", "sw"], None, tmp_path / "tasks")
    assert [len(task.eval_docs) for task in load_tasks(definitions, Lock())] == [2, 2]
    assert asked_for == ["juletxara/mgsm"]  # for both languages
    assert not datasets.config.HF_HUB_OFFLINE and not constants.HF_HUB_OFFLINE


def evaluation(
    tasks: list[tuple[Any, ...]], languages: list[str], run_code: bool = False
) -> EvalStage:
    scored = Eval("", [EvalTask(*task) for task in tasks], run_code=run_code)
    return EvalStage(stage="eval", eval=scored, languages=languages)


def test_the_sets_that_evaluations_read_of_the_hub() -> None:
    sets, left_out = evaluated_sets(evaluation([("mgsm_direct", 2), ("flores", 0)], ["en", "zh"]))
    assert left_out == []
    assert sets == [
        ("juletxara/mgsm", "en", "test"),
        ("juletxara/mgsm", "en", "train"),
        ("juletxara/mgsm", "zh", "test"),
        ("juletxara/mgsm", "zh", "train"),
        ("openlanguagedata/flores_plus", "eng_Latn", "dev"),
        ("openlanguagedata/flores_plus", "eng_Latn", "devtest"),
        ("openlanguagedata/flores_plus", "cmn_Hans", "dev"),
        ("openlanguagedata/flores_plus", "cmn_Hans", "devtest"),
    ]


def test_programs_are_left_out_with_a_reason_where_that_is_possible() -> None:
    """Their English set is fetched where they may be run; translations are on no hub."""
    english = [("google-research-datasets/mbpp", "full", "test")]
    not_run = "mbpp runs the programs that a model writes. Allow it with eval.run_code=true"
    for possible, code, run_code, fetched, reason in (
        (True, "sw", False, [], not_run),
        (True, "sw", True, [], "mbpp in Swahili is not on the Hub"),
        (True, "en", True, english, None),
        (False, "en", True, english, None),
    ):
        sets, left_out = evaluated_sets(evaluation([("mbpp", 0, possible)], [code], run_code))
        assert sets == fetched and len(left_out) == (reason is not None)
        assert reason is None or left_out[0].startswith(reason)
    with pytest.raises(PipelineError, match=not_run):
        evaluated_sets(evaluation([("mbpp", 0)], ["sw"]))
