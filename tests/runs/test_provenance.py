"""Where a run was made: no credential of it is kept."""

import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Call
from small_runs import a_run, writes

from pipeline.config.stages import Launcher
from pipeline.errors import PipelineError
from pipeline.hub.addresses import (
    Masked,
    _secret_values,
    masked_output,
    plain_addresses,
    without_credentials,
)
from pipeline.launch.in_process import error_sentence
from pipeline.runs import provenance, tracking
from pipeline.runs.make import make_once
from pipeline.runs.manifest import read_manifest


def test_credentials_are_taken_out_of_every_address() -> None:
    nested = {
        "a": ["https://me:p@ss@host/x@y", "git+ssh://token@host"],
        "b": {"c": "me@host?", "d": 1},
    }
    assert without_credentials(nested) == {
        "a": ["https://host/x@y", "git+ssh://host"],
        "b": {"c": "me@host?", "d": 1},
    }
    assert (
        without_credentials("model.path=https:/me:p@host is no folder")
        == "model.path=https:/host is no folder"
    )
    assert (
        plain_addresses("https://me:p@host/key=5/part.parquet?x=1")
        == "https://host/key=5/part.parquet"
    )  # a file's
    told = (
        "x.url=https://me:pw@host/a.gz?token=1&X-Amz-Signature=2#access_token=3 and"
        " hf://datasets/a/b@c/d: why?"
    )
    assert without_credentials(told) == "x.url=https://host/a.gz and hf://datasets/a/b@c/d: why?"


@pytest.mark.parametrize(
    ("text", "shown"),
    {
        "launcher.setup=[export HF_TOKEN=sesame]": "launcher.setup=[export HF_TOKEN=***]",
        """'launcher.setup=["export A_SECRET=sesame, open"]'""": (
            """'launcher.setup=["export A_SECRET=***, open"]'"""
        ),
        "apptainer exec --env WANDB_API_KEY='a b' image": (
            "apptainer exec --env WANDB_API_KEY='***' image"
        ),
        '{"my.password": "sesame, open", "tokens": 3}': '{"my.password": "***", "tokens": 3}',
        "password: sesame": "password: ***",
        "--api-key=sesame": "--api-key=***",
        "tokenizer=data_root eval.max_gen_toks=512 keys=3": (
            "tokenizer=data_root eval.max_gen_toks=512 keys=3"
        ),
        "num_key_value_heads=8 eos_token_id: 128001": "num_key_value_heads=8 eos_token_id: 128001",
        "PIN_TOKEN=123456": "PIN_TOKEN=***",
        "unknown key sft.lr: did you mean it? write key=value": (
            "unknown key sft.lr: did you mean it? write key=value"
        ),
        "every.KEY=VALUE, token=...": "every.KEY=VALUE, token=...",
        "GITHUB_PAT=sesame MYAPIKEY=sesame": "GITHUB_PAT=*** MYAPIKEY=***",
        "db.passwd: sesame, CREDENTIALS='open sesame'": "db.passwd: ***, CREDENTIALS='***'",
        "curl -H 'Authorization: Bearer sesame' x": "curl -H 'Authorization: ***' x",
        f"wandb login {'a1' * 20} at commit {'a1' * 20}": f"wandb login *** at commit {'a1' * 20}",
        f"hf_{'Ab1' * 10} ghp_{'Ab1' * 10} github_pat_{'1_a' * 9}": "*** *** ***",
        "hf_hub_download sk-en_translation compat=1": "hf_hub_download sk-en_translation compat=1",
    }.items(),
)
def test_values_of_secret_names_are_masked(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
    assert without_credentials([text]) == [shown]


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A screen that is cleared, a title, a bell, letters in another order.

    A bar's carriage return stays.
    """
    with masked_output():
        print("a\x1b[2J\x1b]0;title\x07b \u202eevil \x9b31m \x1b[31mred\x1b[0m\n\tc", end="")
        print("\r50 %", file=sys.stderr)
    out, err = capsys.readouterr()
    assert (
        out == "a\ufffd[2J\ufffd]0;title\ufffdb \ufffdevil \ufffd31m red\n\tc" and err == "\r50 %\n"
    )
    sentence = error_sentence(PipelineError("a\rb\x1b[2Jc"))
    assert sentence == "a\ufffdb\ufffd[2Jc"


NESTED = (
    "key_" * 100_000,
    f"key={')' * 400_000}x",
    "key=[ " * 20_000,
    "a" * 200_000 + "_key" * 50_000,
)


def test_secrets_of_the_environment_are_masked_wherever_they_appear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "dead8eef" * 5)
    monkeypatch.setenv("SOME_KEY", "plainly")
    _secret_values.cache_clear()
    assert without_credentials(f"401 for {'dead8eef' * 5}, plainly") == "401 for ***, plainly"
    monkeypatch.undo()
    _secret_values.cache_clear()


def test_long_text_is_masked_in_linear_time() -> None:
    begun = time.process_time()
    for text in ("a_" * 200_000, "A" * 400_000, "key=" * 50_000, "https://" * 50_000, *NESTED):
        without_credentials(text)
    assert time.process_time() - begun < 5  # a quadratic pattern takes minutes


def test_whatever_is_printed_is_masked(capsys: pytest.CaptureFixture[str]) -> None:
    """Tracebacks too, and streams keep what they can do."""

    @masked_output()
    def work() -> None:
        print("HF_TOKEN=sesame")
        print("x https://me:sesame@host/x", file=sys.stderr)
        try:
            raise OSError("API_KEY=sesame")
        except OSError:
            traceback.print_exc()
        assert sys.stderr.isatty() is False and sys.stderr.encoding

    work()
    told = capsys.readouterr()
    shown = told.out + told.err
    assert "sesame" not in shown and shown.count("***") == 3 and "OSError: API_KEY=***" in shown
    assert not isinstance(sys.stderr, Masked)


def test_a_group_that_may_hold_a_secret_is_refused(tmp_path: Path, call: Call) -> None:
    told = call(
        "stage=data", "expert=math", "group='HF_TOKEN=sesame'", f"runs_dir={tmp_path}", status=1
    ).err
    assert (
        "group must not contain =" in told and "sesame" not in told and len(told.splitlines()) == 1
    )


def test_the_launcher_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines of bash may hold secrets: neither in the manifest nor handed to W&B."""
    given: dict[str, Any] = {}

    @contextmanager
    def open_run(folder: Path, settings: Any, **described: Any) -> Iterator[tracking.Tracker]:
        given.update(described)
        yield tracking.Tracker(None)

    monkeypatch.setattr(tracking, "open_run", open_run)
    launcher = Launcher(setup=["source sesame"], wrap="sesame", options=["--comment=sesame"])
    folder = make_once(a_run(tmp_path, launcher=launcher), writes())
    assert "sesame" not in (folder / "manifest.json").read_text() + repr(given)
    assert "launcher" not in read_manifest(folder).config and "launcher" not in given["config"]  # type: ignore[union-attr]
    assert given["config"]["seed"] == 0


def test_another_python_does_not_get_this_ones_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/here"), monkeypatch.setenv("MINE", "x")
    here, there = provenance.environment_for(None), provenance.environment_for("/other/bin/python")
    assert (
        here["PYTHONPATH"] == "/here"
        and "PYTHONPATH" not in there
        and here.items() - there.items() == {("PYTHONPATH", "/here")}
    )


def test_results_do_not_make_a_commit_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@x"]
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    source = tmp_path / "src/pipeline/provenance.py"
    for file in (source, tmp_path / "results/table.csv"):
        file.parent.mkdir(parents=True)
        file.write_text("1\n")
    monkeypatch.setattr(provenance, "__file__", str(source))
    provenance.git_state.cache_clear()
    assert provenance.git_state() == {"commit": None, "dirty": None}  # no checkout
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "results/table.csv").write_text("2\n")
    provenance.git_state.cache_clear()
    assert provenance.git_state() == {"commit": commit, "dirty": False}
    source.write_text("2\n")
    assert provenance.git_state() == {
        "commit": commit,
        "dirty": False,
    }  # of the code that this process has imported
    provenance.git_state.cache_clear()
    assert provenance.git_state() == {"commit": commit, "dirty": True}
    provenance.git_state.cache_clear()


def test_no_password_of_an_address_is_printed(tmp_path: Path, call: Call) -> None:
    training = ["stage=sft", "expert=sw", "model=https://u:sesame@h"]
    told = [call("stage=show", "run=https://user:sesame@host", f"runs_dir={tmp_path}", status=1)]
    told += [
        call(*training, f"runs_dir={tmp_path}", status=1),
        call(*training, "--cfg", "job", status=0),
    ]
    assert not any("sesame" in one.out + one.err for one in told) and "https://h" in told[-1].out
