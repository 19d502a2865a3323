"""What RUN means; whose the folders of runs_dir are, when two share their digits too.

And the base of an expert.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_runs import a_run, never, of_digits, writes

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.runs.find import find_run
from pipeline.runs.folders import (
    finished_names,
    folder_of,
    scan_folders,
)
from pipeline.runs.lineage import base_folder, base_of
from pipeline.runs.make import make_once, why_not_finished
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Folder
from pipeline.runs.state import update_state
from pipeline.stages.resolver import label_of
from pipeline.stages.rows import build


def test_what_a_run_reference_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (
        make_once(a_run(tmp_path, label=label, seed=seed), writes())
        for label, seed in (("math-a", 1), ("math-b", 2))
    )
    assert find_run(one.name, tmp_path, "x").folder == one
    assert find_run("math-a", tmp_path, "x").hash == read_manifest(one).hash  # type: ignore[union-attr]
    assert find_run(str(two), tmp_path, "x").folder == two
    monkeypatch.chdir(tmp_path)
    assert find_run(f"./{two.name}", Path("elsewhere"), "x").name == two.name
    with pytest.raises(PipelineError) as refused:
        find_run("math", tmp_path, "checkpoint")
    assert one.name in str(refused.value) and two.name in str(refused.value)
    assert "checkpoint=math means more than one run" in str(refused.value)
    with pytest.raises(
        PipelineError, match="mth-a is not a finished run of .*: did you mean math-a"
    ):
        find_run("mth-a", tmp_path, "checkpoint")


def test_a_run_that_is_not_finished_says_its_state(tmp_path: Path) -> None:
    run = a_run(tmp_path, label="kpz-full")
    run.workplace.mkdir(parents=True)
    update_state(run.workplace, name=run.name, state="running")
    with pytest.raises(
        PipelineError, match=rf"run=kpz: {run.name} is not finished, it is running: see stage="
    ):
        find_run("kpz", tmp_path, "run")


def test_a_model_on_the_hub_or_in_a_folder(tmp_path: Path) -> None:
    found = find_run("hub:org/name", tmp_path, "model.path")
    assert (found.name, str(found.folder)) == ("name", "org/name")
    assert found.hash != find_run("hub:org/other", tmp_path, "model.path").hash
    older = find_run("hub:org/name@v1.0", tmp_path, "checkpoint")
    assert (older.name, str(older.folder), older.hub) == ("name", "org/name@v1.0", "org/name@v1.0")  # type: ignore[attr-defined]
    assert older.hash not in (
        found.hash,
        find_run("hub:org/name@main", tmp_path, "checkpoint").hash,
    )
    with pytest.raises(
        PipelineError, match=r"model.path=hub:org/name@v1.0: give .* as model.revision=v1.0"
    ):
        find_run("hub:org/name@v1.0", tmp_path, "model.path")
    with pytest.raises(PipelineError, match="Write hub:org/name, or hub:org/name@REVISION"):
        find_run("hub:org/name@", tmp_path, "checkpoint")
    folder = tmp_path / "my model [1]"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(
        PipelineError, match=r"no config.json or adapter_config.json with \*.safetensors, so"
    ):
        find_run(str(folder), tmp_path, "model.path")
    (folder / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")  # a header without tensors
    was = find_run(str(folder), tmp_path, "model.path")
    assert (
        was.name == folder.name and was.hash == find_run(f"{folder}/", tmp_path, "model.path").hash
    )
    (folder / "README.md").write_text("a note changes nothing")
    assert find_run(str(folder), tmp_path, "model.path").hash == was.hash
    (folder / "model.safetensors").write_bytes(b"\3" + bytes(7) + b"{} ")
    assert find_run(str(folder), tmp_path, "model.path").hash != was.hash
    run = build(
        compose(["stage=eval", "eval=mgsm_2shot", f"checkpoint='{folder}'", f"runs_dir={tmp_path}"])
    )  # type: ignore[arg-type]
    assert (
        run.name.startswith("eval-mgsm_2shot-my-model-1") and why_not_finished(run) == "never made"
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write the folder of a model with one tensor."""
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_model_whose_settings_were_half_written(name: str, model: Path) -> None:
    (model / name).write_text('{"model_type": "lla')
    with pytest.raises(PipelineError, match=rf"/{name} is not valid JSON"):
        find_run(str(model), model / "runs", "checkpoint")


@pytest.mark.parametrize("has_file", [True, False])
def test_a_tokenizer_of_texts_alone_identifies_a_folder(has_file: bool, model: Path) -> None:
    """merges.txt and vocab.txt count only if tokenizer.json does not exist."""
    if has_file:
        (model / "tokenizer.json").write_text("{}")
    hashes = []
    for merges in ("a b", "b a"):
        (model / "merges.txt").write_text(merges)
        (model / "notes.txt").write_text(f"about {merges}")
        hashes.append(find_run(str(model), model / "runs", "checkpoint").hash)
    assert (hashes[0] == hashes[1]) == has_file


def test_a_file_that_is_added_after_the_plan_is_a_change_where_models_are_read_by_its_name(
    model: Path,
) -> None:
    found = find_run(str(model), model / "runs", "checkpoint")
    assert isinstance(found, Folder) and found.hash and not found.has_changed
    (model / "notes.json").write_text("{}")
    assert not found.has_changed
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert found.has_changed


def test_two_runs_may_share_the_digits_of_their_hashes(tmp_path: Path) -> None:
    one, two = (of_digits(a_run(tmp_path, label=f"data-{seed}", seed=seed)) for seed in (1, 2))
    first = make_once(one, writes("one\n", weights="one"))
    assert why_not_finished(two) == "never made" and first.name == "data-1-0123456789ab"
    second = make_once(two, writes("two\n", weights="two"))
    for run, folder, text in ((one, first, "one\n"), (two, second, "two\n")):
        assert (
            make_once(run, never) == folder == run.folder
            and (folder / "train.jsonl").read_text() == text
        )
        assert find_run(folder.name, tmp_path, "checkpoint").hash == run.hash
    shutil.rmtree(first)
    assert two.folder == second and one.folder == first and why_not_finished(one) is not None
    other = of_digits(a_run(tmp_path, label="data-2", seed=3))  # of the same label, too
    with pytest.raises(
        PipelineError, match=f"{second.name} has no manifest.json of this run, so another made it"
    ):
        make_once(other, never)
    assert (second / "train.jsonl").read_text() == "two\n"


# --- the scan ---


def test_a_scan_is_kept_while_the_folder_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_once(a_run(tmp_path), writes())
    os.utime(tmp_path, (0, 0))  # untouched for long, so that its scan is kept
    first = scan_folders(tmp_path)
    monkeypatch.setattr(os, "listdir", lambda path: pytest.fail("read again"))
    assert scan_folders(tmp_path) is first


def test_a_run_published_within_the_same_second_is_seen(tmp_path: Path) -> None:
    """Another process may publish it, and the file system's clock may not have ticked."""
    one, two = a_run(tmp_path, seed=1), a_run(tmp_path, seed=2)
    assert folder_of(one.hash, tmp_path) is None  # which reads runs_dir, young as it is
    make_once(one, writes())
    assert folder_of(one.hash, tmp_path) == one.folder and scan_folders(tmp_path).names
    tick = os.stat(tmp_path).st_mtime_ns
    text = (
        "from small_runs import a_run, writes; from pipeline.runs.make import make_once; from"
        f" pathlib import Path\nmake_once(a_run(Path({str(tmp_path)!r}), seed=2), writes())"
    )
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", text], check=True, env=here, capture_output=True)
    os.utime(tmp_path, ns=(tick, tick))
    assert folder_of(two.hash, tmp_path) == two.folder != one.folder
    assert finished_names(tmp_path) == sorted([one.folder.name, two.folder.name])


def test_a_parent_is_known_by_all_digits_of_its_hash(tmp_path: Path) -> None:
    """The base of an expert: not the run that shares twelve digits with it and is first by name."""
    other, base = (
        of_digits(a_run(tmp_path, label=label, seed=seed)) for label, seed in (("a", 1), ("b", 2))
    )
    make_once(other, writes(weights="other"))
    make_once(base, writes(weights="base"))
    expert = a_run(tmp_path, {"model": base}, label="expert", seed=3)
    make_once(expert, writes(weights="expert"))
    manifest = read_manifest(expert.folder)
    assert manifest is not None and manifest.parents["model"].content == "base"
    assert (
        label_of(find_run(base.folder.name, tmp_path, "base")) == "b"
        and len(base.folder.name) == len("b-") + 12
    )
    found = find_run(expert.name, tmp_path, "checkpoint")
    assert base_of(found, tmp_path).hash == base.hash
    assert base_folder(expert.folder) == base.folder
    shutil.rmtree(base.folder)  # no longer here; what shares its digits does not stand in for it
    with pytest.raises(
        PipelineError, match=f"{expert.name}: its base {base.name} is not in runs_dir"
    ):
        base_of(found, tmp_path)


def test_the_base_is_the_one_that_was_recorded(
    tmp_path: Path, models: dict[str, list[Path]]
) -> None:
    """Neither later weights in its folder nor a base that was made again count.

    A task vector or an adapter on such weights is another model.
    """
    folder = shutil.copytree(models["llama"][0], tmp_path / "base")
    base = find_run(str(folder), tmp_path, "model.path")
    expert = a_run(tmp_path, {"model": base}, label="expert")
    make_once(expert, writes(weights="expert"))
    manifest = read_manifest(expert.folder)
    assert manifest is not None
    replace(manifest, config={"model": {"path": str(folder)}}).write(expert.folder)
    found = find_run(expert.name, tmp_path, "checkpoint")
    assert base_of(found, tmp_path).hash == base.hash and base_folder(expert.folder) == folder
    shutil.copy(models["llama"][1] / "model.safetensors", folder)
    for look_up in (lambda: base_of(found, tmp_path), lambda: base_folder(expert.folder)):
        with pytest.raises(
            PipelineError, match=f"{expert.name} was made from base, and {folder} has changed since"
        ):
            look_up()
    shutil.copy(models["llama"][0] / "model.safetensors", folder)
    assert base_folder(expert.folder) == folder

    base = a_run(tmp_path, label="made", seed=1)
    make_once(base, writes(weights="first"))
    of_run = a_run(tmp_path, {"model": base}, label="expert", seed=2)
    make_once(of_run, writes(weights="expert"))
    assert base_folder(of_run.folder) == base.folder
    make_once(a_run(tmp_path, label="made", seed=1, redo=True), writes(weights="second"))
    found = find_run(of_run.name, tmp_path, "checkpoint")
    for look_up in (lambda: base_of(found, tmp_path), lambda: base_folder(of_run.folder)):
        with pytest.raises(
            PipelineError,
            match=f"{of_run.name} was made from {base.name}, and .* has changed since",
        ):
            look_up()
