"""Scores are found again by all that decides them, or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import Notes, asked, run_of, write_rows

from pipeline.benchmarks import task_files
from pipeline.evaluate import score, score_cache, stage, torch_backend
from pipeline.evaluate.records import ScoreRow, TaskResult
from pipeline.evaluate.score import load_tasks
from pipeline.evaluate.tasks import task_definitions
from pipeline.runs.manifest import Ancestor, Manifest
from pipeline.runs.run import External


@pytest.fixture
def scored_again(data_root: Path, tmp_path: Path, tiny: Path) -> Callable[..., list[str]]:
    """Score MGSM and Belebele in English, and again: the names of what was found the second time."""

    def once(checkpoint: Path, **knobs: Any) -> list[str]:
        both = [asked("mgsm", 2), asked("belebele", 2)]
        run = run_of(tmp_path, checkpoint, data_root, *both, **({"max_gen_toks": 4, "languages": ["en"]} | knobs))
        work = tmp_path / "work"
        shutil.rmtree(work, ignore_errors=True)
        facts = stage.make(run, work, Notes())
        return facts["harness"]["found_again"]

    def twice(
        change: Callable[[], Any] = lambda: None,
        checkpoint: Path = tiny,
        before: dict[str, Any] | None = None,
        **knobs: Any,
    ) -> list[str]:
        assert once(tiny, **(before or {})) == []
        change()
        return once(checkpoint, **knobs)

    return twice


BOTH = ["mgsm_en_2shot", "belebele_en_2shot"]


def test_the_same_again_needs_no_model(
    scored_again: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first: dict[str, Any] = {}

    def change() -> None:
        first["scores"] = (tmp_path / "work/scores.json").read_text()
        first["samples"] = (tmp_path / "work/samples/mgsm.en.jsonl").read_text()
        monkeypatch.setattr(stage, "load_model", lambda *_: pytest.fail("a model was loaded"))

    assert scored_again(change, batch_size=2) == BOTH  # a batch size decides nothing
    assert json.loads((tmp_path / "work/scores.json").read_text())["rows"] == json.loads(first["scores"])["rows"]
    assert (tmp_path / "work/samples/mgsm.en.jsonl").read_text() == first["samples"]


def test_a_copy_of_the_weights_is_the_same_model(scored_again: Callable[..., list[str]], tiny: Path) -> None:
    copy = tiny.with_name("copy")
    assert scored_again(lambda: shutil.copytree(tiny, copy), copy) == BOTH


@pytest.mark.parametrize(
    "knobs",
    [{"dtype": "bfloat16"}, {"limit": 3}, {"redo": True}, {"max_gen_toks": 5}],
    ids=["dtype", "fewer questions", "redo", "longer answers"],
)
def test_another_way_of_asking_is_scored(scored_again: Callable[..., list[str]], knobs: dict[str, Any]) -> None:
    expected = ["belebele_en_2shot"] if "max_gen_toks" in knobs else []
    assert scored_again(**knobs) == expected


@pytest.mark.parametrize("other", [{"batch_size": 2}, {"share_prefix": False}, {}], ids=str)
def test_below_float32_what_rounds_otherwise_is_scored(
    scored_again: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    narrow: dict[str, Any] = {"dtype": "bfloat16", "languages": ["en"], "limit": 2, "max_gen_toks": 1}
    another = (
        (lambda: None) if other else (lambda: monkeypatch.setattr(score, "processor_model", lambda: "another one"))
    )
    assert scored_again(another, before=narrow, **narrow | other) == []


def test_below_float32_a_batch_that_memory_halved_is_not_kept(
    scored_again: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not computed as its key says: in float32 that changes nothing."""
    narrow: dict[str, Any] = {"dtype": "bfloat16", "limit": 2, "max_gen_toks": 1}
    monkeypatch.setattr(score, "was_halved", lambda lm, asked: True)
    assert scored_again(before=narrow, **narrow) == []
    assert scored_again(limit=2, max_gen_toks=1, before={"limit": 2, "max_gen_toks": 1}) == BOTH


def test_other_weights_data_or_words_are_scored(
    scored_again: Callable[..., list[str]], tiny: Path, data_root: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    def other_exemplar() -> None:
        file = data_root / "mgsm/en/train.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows[0]["question"] += " Or so?"
        write_rows(file, rows)

    def other_weights() -> None:
        tensors = load_file(tiny / "model.safetensors")
        tensors["model.norm.weight"][0] += 1
        save_file(tensors, tiny / "model.safetensors", {"format": "pt"})

    def other_config() -> None:
        config = json.loads((tiny / "config.json").read_text())
        config["rms_norm_eps"] = 1e-3
        (tiny / "config.json").write_text(json.dumps(config))

    assert scored_again(other_exemplar) == ["belebele_en_2shot"]
    shutil.rmtree(tmp_path / "runs")
    assert scored_again(other_weights) == []
    shutil.rmtree(tmp_path / "runs")
    assert scored_again(other_config) == []


def test_another_harness_or_backend_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model, task = {"root": "a"}, {"name": "b"}
    plain = {"backend": "hf", "chat_template": False}
    ways = [plain, plain | {"backend": "vllm"}, plain | {"chat_template": True}]
    keys = [score_cache.whole_key(model, task, way, 1) for way in ways]
    keys.append(score_cache.whole_key(model, task, plain, 2))
    monkeypatch.setattr(score_cache, "version", lambda package: "0.0.1")
    keys.append(score_cache.whole_key(model, task, plain, 1))
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == 5


def test_a_score_is_found_after_a_module_was_renamed(data_root: Path, tmp_path: Path) -> None:
    """What decides is what a task file says and which function it names, not in which module that function is now."""
    (definition,) = task_definitions([asked("global_mmlu", 1)], ["qac"], data_root, tmp_path / "tasks")
    (task,) = load_tasks([definition])
    ours = (task_files.OURS / "global_mmlu.yaml").read_text()
    assert "!function pipeline.evaluate.global_mmlu.BySubject" in ours
    spellings = {
        "renamed": ours.replace("evaluate.global_mmlu.BySubject", "evaluate.by_subject.BySubject")
        + "# and a comment\n",
        "another function": ours.replace("BySubject", "AllTogether"),
        "another word": ours + 'target_delimiter: "\\n"\n',
    }
    keys = {"now": score_cache.task_key(definition, task, range(8))}
    for name, text in spellings.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        file = tmp_path / f"{name} task.yaml"
        file.write_text(definition.file.read_text().replace(str(task_files.OURS / "global_mmlu.yaml"), f"{name}.yaml"))
        keys[name] = score_cache.task_key(replace(definition, file=file), task, range(8))
    model, settings = {"root": "a"}, {"backend": "hf"}
    kept = score_cache.Kept(tmp_path / "scores", model, 2)
    row = ScoreRow("global_mmlu", "qac", None, None, 1, "acc", "none", 0.25, None, 8)
    result = TaskResult([row], [{"doc_id": 0}], "hash", 1.0)
    kept.keep(score_cache.whole_key(model, keys["renamed"], settings, 2), result)
    found = {name: kept.look_up(score_cache.whole_key(model, key, settings, 2)) for name, key in keys.items()}
    assert found == {"now": result, "renamed": result, "another function": None, "another word": None}
    assert str(tmp_path) not in json.dumps(keys) and str(task_files.OURS) not in json.dumps(keys)


def test_an_adapter_is_not_the_same_on_another_base(tmp_path: Path) -> None:
    found = []
    for base in ("one", "two"):
        folder = tmp_path / base
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        facts = {"weights": {"root": "sha256:adapter"}}
        Manifest(base, "hash", {"stage": "sft"}, facts, parents={"model": Ancestor("m", "h", base)}).write(folder)
        found.append(score_cache.model_key(External(base, "hash", folder)))
    assert found[0]["root"] == found[1]["root"] and found[0] != found[1]


@pytest.mark.parametrize("harm", ["half", "value", "key"])
def test_a_file_that_is_not_whole_is_not_there(
    scored_again: Callable[..., list[str]], tmp_path: Path, harm: str
) -> None:
    def change() -> None:
        (file,) = (tmp_path / "runs/.scores").glob("mgsm*.json")
        text = file.read_text()
        kept = json.loads(text)
        if harm == "value":
            kept["scored"]["rows"][0]["value"] = 0.99
        if harm == "key":
            kept["key"]["backend"] = "vllm"
        file.write_text(text[: len(text) // 2] if harm == "half" else json.dumps(kept))

    assert scored_again(change) == ["belebele_en_2shot"]


def test_an_evaluation_that_stops_keeps_what_it_scored(
    data_root: Path, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score_one = score.score_one

    def until_belebele(lm: Any, definition: Any, *rest: Any) -> Any:
        if definition.task == "belebele":
            raise KeyboardInterrupt
        return score_one(lm, definition, *rest)

    run = run_of(tmp_path, tiny, data_root, asked("mgsm", 2), asked("belebele", 2), max_gen_toks=4)
    monkeypatch.setattr(score, "score_one", until_belebele)
    with pytest.raises(KeyboardInterrupt):
        stage.make(run, tmp_path / "work", Notes())
    monkeypatch.undo()
    facts = stage.make(run, tmp_path / "work", Notes())
    assert facts["harness"]["found_again"] == ["mgsm_en_2shot", "mgsm_qac_2shot"]
    assert not list((tmp_path / "runs/.scores").glob("*.part"))


# ------------------------------------------------------------------------------------------- one answer after another


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of prompts that were decoded, a number for each time."""
    numbers: list[int] = []
    real = torch_backend.decode

    def counted(lm: Any, prefix: Any, rests: list[Any], *others: Any) -> None:
        numbers.append(len(rests))
        real(lm, prefix, rests, *others)

    monkeypatch.setattr(torch_backend, "decode", counted)
    return numbers


def evaluate(folder: Path, checkpoint: Path, data_root: Path, **knobs: Any) -> str:
    """The samples of MGSM in English."""
    knobs = {"languages": ["en"], "max_gen_toks": 4, "limit": 6, "dtype": "float32", "batch_size": 2} | knobs
    shutil.rmtree(folder / "work", ignore_errors=True)
    stage.make(run_of(folder, checkpoint, data_root, asked("mgsm", 2), **knobs), folder / "work", Notes())
    return (folder / "work/samples/mgsm.en.jsonl").read_text()


def test_a_killed_evaluation_resumes_at_the_next_question(
    tmp_path: Path, tiny: Path, data_root: Path, decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after three of six answers, the last one written in part: four are computed, and samples are the same."""
    expected = evaluate(tmp_path / "whole", tiny, data_root)
    real = score_cache.Answers.keep

    def killed(self: score_cache.Answers, *answer: Any) -> None:
        real(self, *answer)
        if len(self.found) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(score_cache.Answers, "keep", killed)
        evaluate(tmp_path, tiny, data_root)
    (file,) = (tmp_path / "runs/.scores").glob("*.jsonl")
    file.write_text(file.read_text()[:-4])
    assert evaluate(tmp_path, tiny, data_root) == expected and decoded == [6, 6, 4]
    assert evaluate(tmp_path, tiny, data_root) == expected and decoded == [6, 6, 4]  # the task's score is stored


@pytest.mark.parametrize(
    ("knobs", "left"),
    [({}, 3), ({"redo": True}, 6), ({"max_gen_toks": 5}, 6), ({"dtype": "bfloat16"}, 6)],
    ids=["a larger limit", "redo", "longer answers", "below float32"],
)
def test_answers_that_are_stored_are_not_computed_again(
    tmp_path: Path, tiny: Path, data_root: Path, decoded: list[int], knobs: dict[str, Any], left: int
) -> None:
    evaluate(tmp_path, tiny, data_root, limit=3, **{name: knobs[name] for name in knobs if name == "dtype"})
    evaluate(tmp_path, tiny, data_root, **knobs)
    assert decoded == [3, left]


def test_a_file_of_answers_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    """Lines of earlier versions end with the answer's tokens; a kill leaves a line in part."""
    kept = score_cache.Answers(tmp_path / "mgsm.jsonl")
    kept.keep(("What?", {"until": []}), " 5", False)
    key = next(iter(kept.found))
    kept.file.write_text("5\n[1, 2]\n" + f'["{key}", " 4", true, [1, 2]]\n' + kept.file.read_text() + '["b", ')
    assert score_cache.Answers(kept.file).found == {key: (" 5", False)}
    assert score_cache.Answers(kept.file).look_up(("What?", {"until": []})) == (" 5", False)
    assert not score_cache.Answers(kept.file, fresh=True).found
