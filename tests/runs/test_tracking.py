"""W&B: when it is online, how a run is tagged, that it finishes, and what an offline file holds."""

import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_words import last_of

from pipeline.config.data import Expert, Source
from pipeline.config.stages import DataStage, Tracking
from pipeline.data import load
from pipeline.errors import PipelineError
from pipeline.runs import tracking
from pipeline.runs.lease import Holder
from pipeline.runs.make import make_once
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run
from pipeline.runs.state import track_state
from pipeline.runs.tracking import Tracker, build_artifact, resolve_mode
from pipeline.runs.unchanged import check_unchanged


@pytest.fixture
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither a key nor a mode in the environment; where NETRC will be read."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_auto_is_online_with_a_key_and_offline_without(
    no_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_mode("auto") == "offline"
    no_key.write_text("machine github.com login me password x\n")
    assert resolve_mode("auto") == "offline"
    no_key.write_text("machine api.wandb.ai login user password x\n")
    assert resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.here.org")
    assert resolve_mode("auto") == "offline"  # that host has no key
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert resolve_mode("auto") == "online"


@pytest.mark.parametrize(
    ("environment", "asked", "mode"),
    [
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "online"}, "offline", "offline"),
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "online"}, "disabled", "disabled"),
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "disabled"}, "auto", "disabled"),
        (
            {"WANDB_MODE": "loud"},
            "auto",
            "^WANDB_MODE=loud is unknown. Use online, offline, disabled",
        ),
        ({}, "online", "Set WANDB_API_KEY, or give tracking.mode=offline"),
        ({"WANDB_MODE": "online"}, "auto", "Set WANDB_API_KEY"),
    ],
)
def test_what_is_asked_for_stands_above_the_environment_and_that_above_auto(
    environment: dict[str, str],
    asked: str,
    mode: str,
    no_key: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Online without a key is refused, where wandb would ask for one."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if mode in ("offline", "disabled"):
        assert resolve_mode(asked) == mode
    else:
        with pytest.raises(PipelineError, match=mode):
            resolve_mode(asked)


class Recorded:
    """Stands in for wandb.init: keeps its arguments and how the run ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import wandb

        self.asked: dict[str, Any] = {}
        self.argv: list[str] = []
        self.exit_code: int | None = None
        monkeypatch.setattr(wandb, "init", self.init)

    def init(self, **asked: Any) -> Any:
        self.asked, self.argv = asked, sys.argv
        nothing = lambda *_, **__: None  # noqa: E731
        return SimpleNamespace(finish=self.finish, log=nothing, summary={}, log_artifact=nothing)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def a_run(runs_dir: Path, **changes: Any) -> Run:
    expert = Expert(
        name="x",
        side="none",
        sources={"x": Source(file="x", rows="text", hub="https://me:sesame@host/x")},
    )
    return Run(
        DataStage(stage="data", runs_dir=str(runs_dir), expert=expert, **changes),
        "data-x",
        version=1,
    )


def test_a_run_goes_on_in_its_workplace_and_a_new_attempt_has_an_id_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, run = Recorded(monkeypatch), a_run(tmp_path)
    make_once(run, lambda *_: {})
    assert (
        Path(recorded.asked["dir"]).parent == run.workplace and recorded.asked["resume"] == "allow"
    )
    make_once(a_run(tmp_path, redo=True), lambda *_: {})
    assert recorded.asked["id"] == f"{run.hash[:32]}-2"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, PipelineError, SystemExit])
def test_a_run_finishes_as_failed_on_every_error(
    error: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch)

    def fails(*_: Any) -> dict[str, Any]:
        raise error("no")

    with pytest.raises(error):
        make_once(a_run(tmp_path), fails)
    assert recorded.exit_code == 1


def test_a_service_that_dies_ends_nothing_and_the_next_run_has_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def dies(run: Run, work: Path, tracker: Tracker) -> dict[str, Any]:
        tracker.log({"loss": 1.0}, step=1)
        kill_service()
        for step in range(2, 8):
            tracker.log({"loss": 1.0}, step=step)
            time.sleep(0.1)
        tracker.summary({"score": 1.0})
        return {}

    folder = make_once(a_run(tmp_path, tracking=Tracking(mode="offline")), dies)
    assert read_manifest(folder) is not None
    told = capfd.readouterr().err
    assert told.count("warning: W&B failed (") == 1 and "Traceback" not in told
    after = a_run(tmp_path, tracking=Tracking(mode="offline"), seed=1)
    assert of_kind("exit", offline_log(make_once(after, lambda *_: {}))[0])


def kill_service() -> None:
    """Kill W&B's service, as a signal to the whole tree does."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            if "wandb-core" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(int(pid), signal.SIGKILL)


def test_a_server_that_does_not_answer_costs_the_deadline(
    tmp_path: Path,
    no_key: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        folder = make_once(a_run(tmp_path, tracking=Tracking(timeout=1.0)), lambda *_: {})
    assert read_manifest(folder) is not None
    assert capfd.readouterr().err.count("warning: W&B failed (") == 1


def records(file: Path) -> Iterator[Any]:
    """Return the records of a .wandb file: a header of 7 bytes, then LevelDB blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, position, joined, block = file.read_bytes(), 7, b"", 32768
    while position + 7 <= len(data):
        left = block - position % block
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if left < 7 or kind == 0:
            position += left
            continue
        joined += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(joined)
            joined = b""
            yield record


def of_kind(kind: str, found: list[Any]) -> list[Any]:
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def items(entries: Any) -> dict[str, Any]:
    return {
        entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in entries
    }


def offline_log(folder: Path) -> tuple[list[Any], Any]:
    """Return the records of an offline log, and its run."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    for _ in range(
        200
    ):  # where the machine is busy, W&B's process still writes when the stage has stopped waiting
        found = list(records(file))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            break
        time.sleep(0.1)
    (opened,) = of_kind("run", found)
    return found, opened


def artifacts_in(folder: Path) -> dict[str, Any]:
    return {artifact.name: artifact for artifact in of_kind("artifact", offline_log(folder)[0])}


def test_an_offline_run_holds_what_the_stage_told(tmp_path: Path) -> None:
    def stage(run: Run, work: Path, tracker: Tracker) -> dict[str, Any]:
        for step in (1, 2):
            tracker.log({"train/loss": 1.5 / step}, step=step)
        tracker.table("plan", ["where", "weight"], [["layer 0", 0.5]])
        tracker.summary({"score": 0.25})
        return {}

    folder = make_once(a_run(tmp_path, group="sandbox", tracking=Tracking(mode="offline")), stage)
    found, opened = offline_log(folder)
    run = a_run(tmp_path)
    assert (opened.run_id, opened.display_name) == (f"{run.hash[:32]}-1", run.name)
    assert (opened.run_group, opened.job_type, opened.project) == (
        "sandbox",
        "data",
        Tracking().project,
    )
    assert items(opened.config.update)["seed"] == 0
    history = [items(record.item) for record in of_kind("history", found)]
    assert [row["train/loss"] for row in history if "train/loss" in row] == [1.5, 0.75]
    assert any("plan" in "".join(row) for row in history)
    told = [items(record.update) for record in of_kind("summary", found)]
    assert any(row.get("score") == 0.25 for row in told)
    assert [record.exit_code for record in of_kind("exit", found)] == [0]
    assert not any(
        name.startswith("wandb/")
        for name in json.loads((folder / "manifest.json").read_text())["files"]
    )


NO_TENSORS = "\x02" + 7 * "\0" + "{}"  # a safetensors file


def a_chain(runs_dir: Path, **settings: Any) -> tuple[Run, Run, Run]:
    """Three finished runs: data, an expert with weights, and an evaluation, which has scores."""

    def made(
        stage: str,
        label: str,
        parents: dict[str, Any],
        files: dict[str, str],
        facts: dict[str, Any],
    ) -> Run:
        x = Expert(name="x", side="none", sources={})
        tracking = Tracking(mode="offline", **settings)
        config = DataStage(stage=stage, runs_dir=str(runs_dir), expert=x, tracking=tracking)
        run = Run(config, label, parents, version=1)

        def stage_function(run: Run, work: Path, _: Tracker) -> dict[str, Any]:
            for name, text in files.items():
                (work / name).write_text(text)
            return facts

        make_once(run, stage_function)
        return run

    weights = {"weights": {"root": "sha256:0", "digests": {}}}
    data = made("data", "data-x", {}, {"train.jsonl": "{}"}, {})
    expert = made(
        "sft",
        "x+y",
        {"data": data},
        {"model.safetensors": NO_TENSORS, "config.json": "{}"},
        weights,
    )
    evaluation = made(
        "eval", "eval-x", {"model": expert}, {"scores.json": "[1]", "samples.jsonl": "{}"}, {}
    )
    return data, expert, evaluation


def test_wandb_sync_which_deletes_uploaded_files_harms_no_run(tmp_path: Path) -> None:
    """W&B 0.31 deletes the files of an artifact of an offline log as if they were temporary."""
    runs = a_chain(tmp_path, weights=True)
    for run in runs:
        for artifact in artifacts_in(run.folder).values():
            for entry in artifact.manifest.contents:
                Path(entry.local_path).unlink()
    for run in runs:
        assert read_manifest(run.folder) is not None
        check_unchanged(run.folder)
    assert (runs[1].folder / "model.safetensors").read_text() == NO_TENSORS


def test_weights_are_an_artifact_on_request(tmp_path: Path) -> None:
    """Of runs that have some.

    The configuration names the parents, whether anything is an artifact or not.
    """
    for weights in (False, True):
        data, expert, evaluation = a_chain(tmp_path / str(weights), weights=weights)
        name = f"{expert.name.replace('+', '-')}-weights"
        found = [artifacts_in(run.folder) for run in (data, expert, evaluation)]
        assert [list(artifacts) for artifacts in found] == [[], [name] * weights, []]
        _, opened = offline_log(evaluation.folder)
        assert items(opened.config.update)["parents"] == {
            "model": {"name": expert.name, "hash": expert.hash}
        }
    logged = found[1][name]
    assert logged.type == "weights"
    files = {entry.path: Path(entry.local_path) for entry in logged.manifest.contents}
    assert (
        set(files) == {"model.safetensors", "config.json"}
        and files["model.safetensors"].read_text() == NO_TENSORS
    )


def test_a_report_is_one_run_with_its_tables_and_figures(tmp_path: Path) -> None:
    folder, (_, _, evaluation) = tmp_path / "reports/t", a_chain(tmp_path)
    (folder / "plots").mkdir(parents=True)
    (folder / "cells.csv").write_text("row,language,value,questions\nbase,NA,0.25,8\nswap,sw,,8\n")
    (folder / "claims.csv").write_text("claim,verdict\nswap > base,holds\n")
    (folder / "plots/bars.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'></svg>")
    for _ in range(2):
        tracking.track_report(folder, Tracking(mode="offline"), "t", [evaluation])
    logs = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len({log.stem for log in logs}) == 1  # the same run, written again
    found = list(records(logs[0]))
    (opened,) = of_kind("run", found)
    assert (opened.display_name, opened.run_group, opened.job_type) == ("table-t", "t", "table")
    assert items(opened.config.update)["parents"] == {evaluation.name: evaluation.hash}
    rows = [items(record.item) for record in of_kind("history", found)]
    shown = {key.partition("/")[0]: key for row in rows for key in row if not key.startswith("_")}
    assert set(shown) == {"cells", "claims", "bars"}
    media = [path for path in logs[0].parent.rglob("*.html") if "bars" in path.name]
    assert media and "<svg" in media[0].read_text()
    (cells,) = (
        json.loads(path.read_text())
        for path in logs[0].parent.rglob("*.table.json")
        if "cells" in path.name
    )
    assert cells["data"] == [["base", "NA", 0.25, 8], ["swap", "sw", None, 8]]


SECRETS = ("sesame", "open-token", "open-signature")
ADDRESS = "http://me:sesame@127.0.0.1:9/rows.jsonl?token=open-token&X-Amz-Signature=open-signature"


def test_no_credential_of_a_url_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No file of a run, the card or W&B has a credential, and none is printed."""
    from pipeline.__main__ import main

    monkeypatch.setenv("HF_TOKEN", "sesame")
    (tmp_path / "root/mgsm/en").mkdir(parents=True)
    (tmp_path / "root/mgsm/en/test.jsonl").write_text(json.dumps({"question": "of no row " * 9}))
    rows = [{"prompt": f"q{n}", "completion": "a"} for n in range(4)]
    (tmp_path / "root/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "stage=data",
        "expert=own",
        "expert.sources.own.rows=pairs",
        "expert.sources.own.file=a.jsonl",
    ]
    words += [
        f"expert.sources.own.url='{ADDRESS}'",
        f"runs_dir={tmp_path}/runs",
        "tracking.mode=offline",
    ]
    local = f"data_root={tmp_path}/root"
    monkeypatch.setattr(sys, "argv", ["pipeline", *words, local])
    assert main([*words, local]) == 0
    assert main([*words, local, "data.size=9"]) == 1
    assert (
        main(last_of([*words, f"expert.sources.own.url={ADDRESS}"])) == 1
    )  # its = and ? are no override without quotes
    assert main([*words, f"data.benchmarks={tmp_path}/root"]) == 1  # not reached
    assert sys.argv == ["pipeline", *words, local]
    assert main(last_of(["-m", *words, local, "seed=3", "tracking.mode=disabled"])) == 0
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert (
        len([path for path in files if path.suffix == ".wandb"]) == 3
    )  # also of a run that failed
    for path in files:
        assert not [secret for secret in SECRETS if secret.encode() in path.read_bytes()], path
    told = capfd.readouterr()
    assert told.err.count("error: ") == 3
    assert not [secret for secret in SECRETS if secret in told.out + told.err]
    for name, count in {"data_card.md": 2, "manifest.json": 2}.items():
        named = [path for path in files if path.name == name and "wandb" not in path.parts]
        assert len(named) == count and all(
            "http://127.0.0.1:9/rows.jsonl" in path.read_text() for path in named
        )

    recorded = Recorded(monkeypatch)
    assert main([*words, local, "seed=2"]) == 0
    assert (
        recorded.asked["config"]["expert"]["sources"]["own"]["url"]
        == "http://127.0.0.1:9/rows.jsonl"
    )
    assert "expert.sources.own.url='http://127.0.0.1:9/rows.jsonl" in recorded.argv
    assert not [
        secret for secret in SECRETS if secret in repr(recorded.asked) + repr(recorded.argv)
    ]


def test_a_failed_run_writes_no_credential_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the message about an empty source nor state.json has a credential."""
    source = Source(url=ADDRESS, rows="pairs")
    monkeypatch.setattr(load, "open_rows", lambda *_: iter([]))
    holder = Holder("id", "here", 1, None, "", "", "")
    with (
        pytest.raises(PipelineError) as refused,
        track_state(tmp_path, holder, "own", "data"),
    ):
        load.open_source("own", source, None)
    assert "source own (http://127.0.0.1:9/rows.jsonl) has no rows." in str(refused.value)
    with pytest.raises(ValueError), track_state(tmp_path, holder, "own", "data"):
        raise ValueError(f"{ADDRESS} is broken")
    written = (tmp_path / "state.json").read_text()
    assert "http://127.0.0.1:9/rows.jsonl is broken" in written
    assert not [secret for secret in SECRETS if secret in written]


def test_a_name_beyond_ascii_is_one_that_wandb_takes(tmp_path: Path) -> None:
    manifest: Any = SimpleNamespace(name="soup-ä-0123", hash="0123", attempt=1, files={})
    assert build_artifact(tmp_path, manifest).name == "soup---0123-weights"
