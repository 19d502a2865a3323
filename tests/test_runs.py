"""A run's identity, its folder and manifest, and finding it again."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, get_args, get_type_hints

import pytest

from pipeline.config.compose import compose
from pipeline.config.data import Expert, Source, World
from pipeline.config.stages import DataStage, RunStage, Tracking
from pipeline.errors import PipelineError
from pipeline.runs import provenance
from pipeline.runs.find import find
from pipeline.runs.lineage import base_folder, base_of
from pipeline.runs.make import make, why_not_finished
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import External, Run, check_unchanged
from pipeline.study.build.resolver import label_of
from pipeline.study.clean import idle_snapshots
from pipeline.study.graph import ordered, unfinished
from pipeline.study.stages import RUN_STAGES, build
from pipeline.study.table import show

HASHES = Path(__file__).with_name("hashes.json")
FULL = {  # a stage or a merge -> words
    "data": "expert=math data.size=5",
    "cpt": "expert=gsm8k_text model=small_bpe recipe=smoke",
    "sft": "expert=math sft.separator=x",
    "layer_swap": "stage=merge merge=layer_swap merge.math=hub:a/b merge.language=hub:a/c",
    "soup": "stage=merge merge=soup merge.experts=[hub:a/b,hub:a/c] merge.weights=[0.5,0.5]",
    "ties": "stage=merge merge=ties merge.experts=[hub:a/b,hub:a/c]",
    "eval": "eval=mgsm_2shot checkpoint=hub:a/b",
}


def full(name: str) -> RunStage:
    """A configuration with something in each part."""
    words = FULL[name].split()
    config: Any = compose(words if words[0].startswith("stage=") else [f"stage={name}", *words])
    if name == "data":
        config.expert.world = World()
    return config


# ------------------------------------------------------------------------------------------------ the hash


def leaves(config: Any, path: tuple[Any, ...] = (), hashed: bool = True) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
    """(path, type, whether it decides results) of each field, and of those inside it."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        value, counts = getattr(config, item.name), hashed and item.metadata.get("hashed", True)
        here = (*path, item.name)
        inside = [((), value)]
        inside += [((key,), inner) for key, inner in value.items()] if isinstance(value, dict) else []
        inside += [((key,), inner) for key, inner in enumerate(value)] if isinstance(value, list) else []
        parts = [(key, inner) for key, inner in inside if is_dataclass(inner)]
        for key, inner in parts:
            yield from leaves(inner, here + key, counts)
        if not parts:
            yield here, hints[item.name], counts


def other(value: Any, hint: Any) -> Any:
    """Another value of the same type."""
    if isinstance(hint, UnionType) and value is None:
        hint = get_args(hint)[0]
        return {int: 7, float: 0.7, str: "other"}.get(hint) or [0.7]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, value[0] if value else "other"]
    return {**value, "other": 1} if isinstance(value, dict) else value + "other"


def put(config: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy of the config with one value changed."""
    config = copy.deepcopy(config)
    node = config
    for key in path[:-1]:
        node = node[key] if isinstance(node, dict | list) else getattr(node, key)
    setattr(node, path[-1], change(getattr(node, path[-1])))
    return config


@pytest.mark.parametrize("name", FULL)
def test_the_hash_changes_exactly_with_what_decides_results(name: str) -> None:
    config = full(name)
    was, seen = Run(config, "x", version=1).hash, set()
    for path, hint, hashed in leaves(config):
        if path[-1] == "stage":
            continue
        changed = Run(put(config, path, lambda value, hint=hint: other(value, hint)), "x", version=1).hash
        assert (changed != was) == hashed, ".".join(map(str, path))
        assert not hashed or changed not in seen, f"{path} is confused with another field"
        seen.add(changed if hashed else None)
    assert len(seen) > 3


@pytest.mark.parametrize(
    ("name", "free"),
    [
        (
            "data",
            "runs_dir redo launcher threads group data_root expert.name expert.side expert.sources.orca_math.paper",
        ),
        ("sft", "runs_dir redo launcher tracking.mode model.path model.name sft.name data.size expert.name data_root"),
        ("eval", "checkpoint data_root eval.name eval.batch_size"),
        ("layer_swap", "merge.math merge.language"),
        ("soup", "merge.experts"),
    ],
)
def test_paths_labels_and_the_batch_size_of_evaluation_are_free(name: str, free: str) -> None:
    unhashed = {".".join(map(str, path)) for path, _, hashed in leaves(full(name)) if not hashed}
    assert set(free.split()) <= unhashed


def test_a_knob_at_its_default_adds_nothing() -> None:
    one = Run(compose(["stage=sft", "expert=math"]), "x", version=1)  # type: ignore[arg-type]
    two = Run(compose(["stage=sft", "expert=math", "sft.epochs=1", "sft.max_grad_norm=1.0", "seed=0"]), "y", version=1)  # type: ignore[arg-type]
    assert one.hash == two.hash
    assert one.decided_by["config"]["sft"] == {"method": "full", "learning_rate": 1e-6, "precision": "bf16"}


def test_parents_and_the_version_are_in_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    config = full("layer_swap")
    parents = {role: External("n", role * 9, Path("x")) for role in ("math", "language")}
    one = Run(config, "x", dict(parents), version=1)
    swapped = Run(config, "x", {"math": parents["language"], "language": parents["math"]}, version=1)
    renamed = Run(config, "x", {**parents, "math": replace(parents["math"], name="m", folder=Path("y"))}, version=1)
    assert one.hash != swapped.hash and one.hash == renamed.hash and one.hash != Run(config, "x", version=1).hash
    assert replace(one, version=2).hash != one.hash


def test_ten_committed_configs_keep_their_hashes() -> None:
    """Where this fails, finished runs are orphaned. A new file: PIPELINE_WRITE_VALUES=1."""
    kept = json.loads(HASHES.read_text())
    assert len(kept) == 10
    found = {words: build(compose(words.split())).hash for words in kept}  # type: ignore[arg-type]
    if os.environ.get("PIPELINE_WRITE_VALUES"):
        HASHES.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(HASHES.read_text())


# ------------------------------------------------------------------------------------------------ making


def a_run(runs_dir: Path, parents: dict[str, Any] | None = None, label: str = "data-x", **changes: Any) -> Run:
    expert = Expert(name="x", side="none", sources={"x": Source(file="x", rows="text")})
    config = DataStage(
        stage="data", runs_dir=str(runs_dir), tracking=Tracking(mode="disabled"), expert=expert, **changes
    )
    return Run(config, label, parents or {}, version=RUN_STAGES["data"].version)


def writes(text: str = "rows\n", weights: str | None = None) -> Any:
    """A stage that writes one file, and records the root of its weights."""

    def stage(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        (work / "train.jsonl").write_text(text)
        return {"weights": {"root": weights}} if weights else {}

    return stage


def never(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
    raise AssertionError(f"{run.name} was made again")


def test_a_finished_run_is_not_made_again(tmp_path: Path) -> None:
    folder = make(a_run(tmp_path), writes())
    manifest = read_manifest(folder)
    assert manifest is not None
    assert make(a_run(tmp_path), never) == folder
    assert (manifest.name, manifest.attempt, list(manifest.files)) == (folder.name, 1, ["train.jsonl"])
    assert manifest.hash.startswith(folder.name[-8:])
    keys = {"decided_by", "config", "parents", "facts", "git", "versions", "machine", "environment", "started", "cost"}
    assert keys <= json.loads((folder / "manifest.json").read_text()).keys()
    assert not list((tmp_path / ".work").glob("[0-9a-f]*[0-9a-f]"))  # only its lock is left


def test_a_label_may_change(tmp_path: Path) -> None:
    folder = make(a_run(tmp_path), writes())
    assert make(a_run(tmp_path, label="another name"), never) == folder


def of_digits(run: Run, digits: str = "0123abcd") -> Run:
    """The run with a hash that begins with these digits, as chance may give it."""
    run.__dict__["hash"] = digits + run.hash[len(digits) :]
    return run


def test_two_runs_may_share_eight_digits_of_their_hashes(tmp_path: Path) -> None:
    one, two = (of_digits(a_run(tmp_path, seed=seed)) for seed in (1, 2))
    first = make(one, writes("one\n", weights="one"))
    assert why_not_finished(two) == "changed: seed 1 -> 2" and first.name == "data-x-0123abcd"
    second = make(two, writes("two\n", weights="two"))
    assert second.name == f"data-x-{two.hash[:12]}" and (first / "train.jsonl").read_text() == "one\n"
    for run, folder, text in ((one, first, "one\n"), (two, second, "two\n")):
        assert make(run, never) == folder == run.folder and (folder / "train.jsonl").read_text() == text
        manifest = read_manifest(folder)
        assert manifest is not None and (manifest.name, manifest.hash) == (folder.name, run.hash)
        found = find(folder.name, tmp_path, "checkpoint")
        assert (found.hash, found.folder) == (run.hash, folder)
    again = of_digits(a_run(tmp_path, seed=2, redo=True))
    assert make(again, writes("again\n", weights="two")) == second and (first / "train.jsonl").read_text() == "one\n"
    assert find(second.name[:-2], tmp_path, "checkpoint").hash == two.hash
    with pytest.raises(PipelineError, match=f"means more than one run: {first.name}, {second.name}"):
        find("data-x-0123", tmp_path, "checkpoint")
    shutil.rmtree(first)  # the other keeps its name
    assert two.folder == second and one.folder == first and why_not_finished(one) is not None
    third = of_digits(a_run(tmp_path, seed=3), two.hash[:12])
    assert make(third, writes("three\n")).name == "data-x-0123abcd"  # which is free again
    assert third.folder != two.folder == second


def test_a_parent_is_known_by_all_digits_of_its_hash(tmp_path: Path) -> None:
    """The base of an expert: not the run that shares eight digits with it and is first by name."""
    other, base = (of_digits(a_run(tmp_path, label=label, seed=seed)) for label, seed in (("a", 1), ("b", 2)))
    make(other, writes(weights="other"))
    make(base, writes(weights="base"))
    expert = a_run(tmp_path, {"model": base}, label="expert", seed=3)
    make(expert, writes(weights="expert"))
    manifest = read_manifest(expert.folder)
    assert manifest is not None and manifest.parents["model"]["content"] == "base"
    assert label_of(find(base.folder.name, tmp_path, "base")) == "b" and len(base.folder.name) == len("b-") + 12
    found = find(expert.name, tmp_path, "checkpoint")
    assert base_of(found, compose([f"runs_dir={tmp_path}", *FULL["soup"].split()])).hash == base.hash  # type: ignore[arg-type]
    assert base_folder(expert.folder) == base.folder
    shutil.rmtree(base.folder)  # no longer here; what shares its digits does not stand in for it
    with pytest.raises(PipelineError, match=f"the base {base.name}|the base .* of {expert.name} is not in runs_dir"):
        base_of(found, compose([f"runs_dir={tmp_path}", *FULL["soup"].split()]))  # type: ignore[arg-type]


def test_snapshots_of_runs_that_share_eight_digits_are_freed_in_their_own_folders(tmp_path: Path) -> None:
    homes = []
    for seed in (1, 2):
        run = of_digits(a_run(tmp_path, seed=seed))
        homes.append(make(run, lambda run, work, _: with_a_snapshot(work)))
    items = idle_snapshots(tmp_path)
    assert sorted(item.folder for item in items) == sorted(home / "snapshots/step-3" for home in homes)


def with_a_snapshot(work: Path) -> dict[str, Any]:
    (work / "snapshots/step-3").mkdir(parents=True)
    (work / "snapshots/step-3/model.safetensors").write_text("x")
    return {"snapshots": {"3": {"root": "x"}}}


def test_work_is_apart_and_status_tells_both(tmp_path: Path, call: Callable[..., SimpleNamespace]) -> None:
    one, two = (of_digits(a_run(tmp_path, seed=seed)) for seed in (1, 2))
    for run in (one, two):
        with pytest.raises(RuntimeError):
            make(run, lambda *_: (_ for _ in ()).throw(RuntimeError))
    assert one.work != two.work and one.work.is_dir() and two.work.is_dir()
    listed = ", ".join(sorted(run.hash[:12] for run in (one, two)))
    assert f"unpublished work: {listed}\n" in call("stage=status", f"runs_dir={tmp_path}").out
    make(two, writes())
    make(one, writes())
    shown = call("stage=status", f"runs_dir={tmp_path}").out
    assert "data-x-0123abcd " in shown and f"data-x-{one.hash[:12]} " in shown


@pytest.mark.parametrize("label", ["eval-org/model", "../up", "a b:c\n", "x" * 300])
def test_a_label_is_the_name_of_one_folder(label: str, tmp_path: Path) -> None:
    folder = make(a_run(tmp_path / "runs", label=label), writes())
    assert folder.parent == tmp_path / "runs" and len(folder.name) < 128 and not folder.name.startswith(".")


def test_the_manifest_is_written_last_and_the_folder_appears_at_once(tmp_path: Path) -> None:
    run = a_run(tmp_path)

    def stage(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        assert work == tmp_path / ".work" / run.hash == run.work  # the same at each attempt
        assert not list(work.iterdir()) and not list(tmp_path.glob("*/manifest.json"))
        (work / "sub").mkdir()
        (work / "sub/rows").write_text("x")
        return {}

    folder = make(run, stage)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert max(times, key=lambda path: times[path]).name == "manifest.json"


def test_work_that_failed_is_begun_anew(tmp_path: Path) -> None:
    run = a_run(tmp_path)

    def fails(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        (work / "half").write_text("x")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        make(run, fails)
    assert not run.folder.exists() and (run.work / "half").exists()
    assert not (make(run, writes()) / "half").exists()


def test_work_that_was_finished_and_not_renamed_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr("pipeline.runs.make.publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        make(run, writes())
    assert not run.folder.exists()
    assert (make(run, never) / "train.jsonl").is_file()


def test_redo_is_a_new_attempt_that_takes_the_place_of_the_old(tmp_path: Path) -> None:
    folder = make(a_run(tmp_path), writes("one\n"))
    assert make(a_run(tmp_path, redo=True), writes("two\n")) == folder
    assert (folder / "train.jsonl").read_text() == "two\n" and read_manifest(folder).attempt == 2  # type: ignore[union-attr]
    assert not list((tmp_path / ".work").glob("*.replaced"))
    with pytest.raises(RuntimeError):
        make(a_run(tmp_path, redo=True), lambda *_: (_ for _ in ()).throw(RuntimeError))
    assert (folder / "train.jsonl").read_text() == "two\n"  # a failed attempt takes nothing away


def test_a_child_sees_that_its_parent_was_made_again(tmp_path: Path) -> None:
    parent = a_run(tmp_path, label="parent", seed=1)
    make(parent, writes(weights="one"))
    child = a_run(tmp_path, {"model": parent}, label="child")
    make(child, writes())
    again = a_run(tmp_path, label="parent", seed=1, redo=True)
    make(again, writes(weights="one"))
    assert why_not_finished(child) is None  # the same weights: nothing to do
    make(again, writes(weights="two"))
    assert why_not_finished(child) == f"its model {parent.name} was made again with other contents"
    grandchild = a_run(tmp_path, {"model": child}, label="grandchild", seed=2)
    make(grandchild, writes())
    reasons = unfinished(ordered([grandchild]))
    assert reasons[grandchild.hash] == f"its parent {child.name} is made first"
    assert make(child, writes()) == child.folder and why_not_finished(child) is None
    assert read_manifest(child.folder).attempt == 2  # type: ignore[union-attr]
    assert unfinished(ordered([grandchild])) == {}


def test_a_run_that_changed_on_disk_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    file = make(run, writes()) / "train.jsonl"
    file.touch()  # another time, the same bytes
    check_unchanged(run.folder)
    file.write_text("rowz\n")
    for use in (lambda: make(run, never), lambda: make(a_run(tmp_path, {"data": run}, label="child"), never)):
        with pytest.raises(PipelineError, match=r"changed after it was finished: train.jsonl differs; .*redo=true"):
            use()
    file.unlink()
    with pytest.raises(PipelineError, match=r"train.jsonl is gone"):
        make(run, never)
    make(a_run(tmp_path, redo=True), writes())
    make(run, never)


def test_a_folder_without_a_manifest_is_not_taken_for_a_run_nor_overwritten(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    folder = make(run, writes())
    (folder / "manifest.json").unlink()
    with pytest.raises(PipelineError, match=r"has no manifest.json, so no run made it: move it away"):
        make(run, never)
    assert (folder / "train.jsonl").is_file()
    with pytest.raises(PipelineError, match=r"has no manifest.json, so it is no finished run, and no config.json"):
        find(folder.name, tmp_path, "checkpoint")


@pytest.mark.parametrize("text", ["{", "[]", '{"of": "another program"}'])
def test_a_manifest_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(PipelineError, match=r"manifest.json is (not readable JSON|no manifest of this program)"):
        read_manifest(tmp_path)


def test_a_full_disk_is_seen_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    with pytest.raises(PipelineError, match=r"^runs_dir=.* is too full for data-x: 0.0 GB free, about 0.1 GB needed;"):
        make(a_run(tmp_path), never)


def slow(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
    with open(run.runs_dir / "calls", "a") as calls:
        calls.write(f"{os.getpid()}\n")
    time.sleep(1)
    return writes()(run, work, tracker)


def in_a_process(runs_dir: str) -> None:
    make(a_run(Path(runs_dir)), slow)


def test_two_processes_that_ask_for_one_run_make_it_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=in_a_process, args=(str(tmp_path),)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    assert "another process is making it; waiting" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------ finding


def test_what_a_run_reference_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (
        make(a_run(tmp_path, label=label, seed=seed), writes()) for label, seed in (("math-a", 1), ("math-b", 2))
    )
    assert find(one.name, tmp_path, "x").folder == one
    assert find("math-a", tmp_path, "x").hash == read_manifest(one).hash  # type: ignore[union-attr]
    assert find(str(two), tmp_path, "x").folder == two
    monkeypatch.chdir(tmp_path)
    assert find(f"./{two.name}", Path("elsewhere"), "x").name == two.name
    with pytest.raises(PipelineError) as refused:
        find("math", tmp_path, "checkpoint")
    assert one.name in str(refused.value) and two.name in str(refused.value)
    assert "checkpoint=math means more than one run" in str(refused.value)
    with pytest.raises(PipelineError, match=rf"mth-a is no finished run of .*; did you mean .*{one.name}"):
        find("mth-a", tmp_path, "checkpoint")


def test_an_exact_name_stands_above_a_prefix(tmp_path: Path) -> None:
    short = make(a_run(tmp_path), writes())
    shutil.copytree(short, tmp_path / f"{short.name}-copy")
    assert find(short.name, tmp_path, "x").folder == short


def test_a_model_on_the_hub_or_in_a_folder(tmp_path: Path) -> None:
    found = find("hub:org/name", tmp_path, "model.path")
    assert (found.name, str(found.folder)) == ("name", "org/name")
    assert found.hash != find("hub:org/other", tmp_path, "model.path").hash
    folder = tmp_path / "my model [1]"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(PipelineError, match="no config.json with safetensors, so it is no model"):
        find(str(folder), tmp_path, "model.path")
    (folder / "model.safetensors").write_bytes(b"0")
    was = find(str(folder), tmp_path, "model.path")
    assert was.name == folder.name and was.hash == find(f"{folder}/", tmp_path, "model.path").hash
    (folder / "README.md").write_text("a note changes nothing")
    assert find(str(folder), tmp_path, "model.path").hash == was.hash
    (folder / "model.safetensors").write_bytes(b"1")
    assert find(str(folder), tmp_path, "model.path").hash != was.hash
    run = build(compose(["stage=eval", "eval=mgsm_2shot", f"checkpoint='{folder}'", f"runs_dir={tmp_path}"]))  # type: ignore[arg-type]
    assert run.name.startswith("eval-mgsm_2shot-my-model-1") and why_not_finished(run) == "never made"


# ------------------------------------------------------------------------------------------------ why, and provenance


def test_the_plan_says_why_a_run_is_not_taken_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert show([]) == "run  stage  seconds  state\n0 of 0 runs to make, about 0 seconds here"
    run, other_seed = a_run(tmp_path), a_run(tmp_path, seed=3)
    assert "never made" in show([run])
    make(run, writes())
    assert "finished" in show([run]) and "0 of 1 runs to make" in show([run])
    assert why_not_finished(other_seed) == "changed: seed default -> 3"
    assert why_not_finished(replace(run, version=99)) == f"changed: version {run.version} -> 99"
    parent = a_run(tmp_path, {"data_root": External("w", "abc", tmp_path)})
    assert why_not_finished(parent) == "changed: parents.data_root default -> abc"
    assert "redo=true" in show([a_run(tmp_path, redo=True)])


def test_credentials_are_taken_out_of_every_address() -> None:
    nested = {"a": ["https://me:p@ss@host/x@y", "git+ssh://token@host"], "b": {"c": "me@host?", "d": 1}}
    assert provenance.without_credentials(nested) == {
        "a": ["https://host/x@y", "git+ssh://host"],
        "b": {"c": "me@host?", "d": 1},
    }
    told = "x.url=https://me:pw@host/a.gz?token=1&X-Amz-Signature=2#access_token=3 and hf://datasets/a/b@c/d: why?"
    assert provenance.without_credentials(told) == "x.url=https://host/a.gz and hf://datasets/a/b@c/d: why?"


def test_no_credential_reaches_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "sesame")
    monkeypatch.setenv("HF_TOKEN", "sesame")
    run = a_run(tmp_path)
    run.config.expert.sources["x"].hub = "https://me:sesame@host/set"  # type: ignore[attr-defined]
    folder = make(run, lambda run, work, tracker: {"from": "https://me:sesame@host"})
    text = (folder / "manifest.json").read_text()
    assert "sesame" not in text and "https://host/set" in text
    assert set(json.loads(text)["environment"]) <= set(provenance.ENVIRONMENT)


def test_results_do_not_make_a_commit_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@x"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    source = tmp_path / "src/pipeline/provenance.py"
    for file in (source, tmp_path / "results/table.csv"):
        file.parent.mkdir(parents=True)
        file.write_text("1\n")
    monkeypatch.setattr(provenance, "__file__", str(source))
    assert provenance.git_state() == {"commit": None, "dirty": None}  # no checkout
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "results/table.csv").write_text("2\n")
    assert provenance.git_state() == {"commit": commit, "dirty": False}
    source.write_text("2\n")
    assert provenance.git_state() == {"commit": commit, "dirty": True}
