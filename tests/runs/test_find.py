"""What RUN means."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_runs import a_run, writes

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.runs.find import find_run
from pipeline.runs.make import make_once, why_not_finished
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Folder
from pipeline.runs.state import update_state
from pipeline.stages.rows import build


def test_what_a_run_reference_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (
        make_once(a_run(tmp_path, label=label, seed=seed), writes()) for label, seed in (("math-a", 1), ("math-b", 2))
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
    with pytest.raises(PipelineError, match=rf"mth-a is not a finished run of .*; did you mean .*{one.name}"):
        find_run("mth-a", tmp_path, "checkpoint")
    make_once(a_run(tmp_path, label="a_merge-3-1-of-many-experts-and-more-words", seed=3), writes())
    with pytest.raises(PipelineError, match=r"; did you mean a_merge-3-1-of-many-"):  # a beginning is a RUN too
        find_run("a_merge-3-2", tmp_path, "checkpoint")


def test_a_merge_that_was_scored_in_memory_is_found_by_its_scores(tmp_path: Path) -> None:
    name = make_once(a_run(tmp_path, label="eval-mgsm-layer_swap-1-1-math-sw-en"), writes()).name
    for reference in ("layer_swap", "layer_swap-1-1"):
        with pytest.raises(PipelineError, match=rf"{reference} is not a finished run of .*; its scores are {name}: gi"):
            find_run(reference, tmp_path, "run")


def test_a_run_that_is_not_finished_says_its_state(tmp_path: Path) -> None:
    run = a_run(tmp_path, label="kpz-full")
    run.workplace.mkdir(parents=True)
    update_state(run.workplace, name=run.name, state="running")
    with pytest.raises(PipelineError, match=rf"run=kpz: {run.name} is not finished, it is running: see stage="):
        find_run("kpz", tmp_path, "run")


def test_a_model_on_the_hub_or_in_a_folder(tmp_path: Path) -> None:
    found = find_run("hub:org/name", tmp_path, "model.path")
    assert (found.name, str(found.folder)) == ("name", "org/name")
    assert found.hash != find_run("hub:org/other", tmp_path, "model.path").hash
    older = find_run("hub:org/name@v1.0", tmp_path, "checkpoint")
    assert (older.name, str(older.folder), older.hub) == ("name", "org/name@v1.0", "org/name@v1.0")  # type: ignore[attr-defined]
    assert older.hash not in (found.hash, find_run("hub:org/name@main", tmp_path, "checkpoint").hash)
    with pytest.raises(PipelineError, match=r"model.path=hub:org/name@v1.0: give .* as model.revision=v1.0"):
        find_run("hub:org/name@v1.0", tmp_path, "model.path")
    with pytest.raises(PipelineError, match="write hub:org/name, or hub:org/name@REVISION"):
        find_run("hub:org/name@", tmp_path, "checkpoint")
    folder = tmp_path / "my model [1]"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(PipelineError, match=r"no config.json or adapter_config.json with \*.safetensors, so"):
        find_run(str(folder), tmp_path, "model.path")
    (folder / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")  # a header without tensors
    was = find_run(str(folder), tmp_path, "model.path")
    assert was.name == folder.name and was.hash == find_run(f"{folder}/", tmp_path, "model.path").hash
    (folder / "README.md").write_text("a note changes nothing")
    assert find_run(str(folder), tmp_path, "model.path").hash == was.hash
    (folder / "model.safetensors").write_bytes(b"\3" + bytes(7) + b"{} ")
    assert find_run(str(folder), tmp_path, "model.path").hash != was.hash
    run = build(compose(["stage=eval", "eval=mgsm_2shot", f"checkpoint='{folder}'", f"runs_dir={tmp_path}"]))  # type: ignore[arg-type]
    assert run.name.startswith("eval-mgsm_2shot-my-model-1") and why_not_finished(run) == "never made"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_model_whose_settings_were_half_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / name).write_text('{"model_type": "lla')
    with pytest.raises(PipelineError, match=rf"/{name} is not valid JSON"):
        find_run(str(tmp_path), tmp_path, "checkpoint")


@pytest.mark.parametrize("has_file", [True, False])
def test_a_tokenizer_of_texts_alone_identifies_a_folder(has_file: bool, tmp_path: Path) -> None:
    """merges.txt and vocab.txt are read where there is no tokenizer.json, and affect no hash where there is."""
    (tmp_path / "m").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "m/model.safetensors")
    (tmp_path / "m/config.json").write_text("{}")
    if has_file:
        (tmp_path / "m/tokenizer.json").write_text("{}")
    hashes = []
    for merges in ("a b", "b a"):
        (tmp_path / "m/merges.txt").write_text(merges)
        (tmp_path / "m/notes.txt").write_text(f"about {merges}")
        hashes.append(find_run(f"{tmp_path}/m", tmp_path / "runs", "checkpoint").hash)
    assert (hashes[0] == hashes[1]) == has_file


def test_a_file_that_is_added_after_the_plan_is_a_change_where_models_are_read_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "m/model.safetensors")
    (tmp_path / "m/config.json").write_text("{}")
    model = find_run(f"{tmp_path}/m", tmp_path / "runs", "checkpoint")
    assert isinstance(model, Folder) and model.hash and not model.has_changed
    (tmp_path / "m/notes.json").write_text("{}")
    assert not model.has_changed
    (tmp_path / "m/chat_template.jinja").write_text("{{ messages }}")
    assert model.has_changed


def test_a_path_below_a_folder_that_is_there_is_no_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(PipelineError, match="name a finished run, or a folder with a model$"):
        find_run("runs/nothing", tmp_path / "runs", "merge.language")
    with pytest.raises(PipelineError, match="or hub:org/nothing for a model on the Hub$"):
        find_run("org/nothing", tmp_path / "runs", "merge.language")
