"""Answers are stored by all that decides them, and found by it or not at all."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up import Notes, asked, run_of, write_rows

from pipeline.data.rows import read_jsonl
from pipeline.evaluate import score, stage, store, torch_backend
from pipeline.runs.manifest import Ancestor, Manifest
from pipeline.runs.run import External


@pytest.fixture
def scored_again(data_root: Path, tmp_path: Path, tiny: Path) -> Callable[..., list[str]]:
    """Score MGSM and Belebele in English twice, and return the names found the second time."""

    def once(checkpoint: Path, **knobs: Any) -> list[str]:
        both = [asked("mgsm", 2), asked("belebele", 2)]
        run = run_of(
            tmp_path,
            checkpoint,
            data_root,
            *both,
            **({"max_gen_toks": 4, "languages": ["en"]} | knobs),
        )
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
        monkeypatch.setattr(
            torch_backend.TorchBackend, "load", lambda _: pytest.fail("weights were read")
        )

    assert scored_again(change, batch_size=2) == BOTH  # a batch size decides nothing
    assert (
        json.loads((tmp_path / "work/scores.json").read_text())["rows"]
        == json.loads(first["scores"])["rows"]
    )
    assert (tmp_path / "work/samples/mgsm.en.jsonl").read_text() == first["samples"]


@pytest.mark.parametrize("other", [{"batch_size": 2}, {"share_prefix": False}, {}], ids=str)
def test_below_float32_what_rounds_otherwise_is_scored(
    scored_again: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    narrow: dict[str, Any] = {
        "dtype": "bfloat16",
        "languages": ["en"],
        "limit": 2,
        "max_gen_toks": 1,
    }

    def another() -> None:
        if not other:
            monkeypatch.setattr(score, "processor_model", lambda: "another one")
            monkeypatch.setattr(score.torch.cuda, "get_device_name", lambda: "another one")

    assert scored_again(another, before=narrow, **narrow | other) == []


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


def test_another_harness_or_backend_is_another_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = {"backend": "hf", "dtype": "float32"}

    def file(version: int = 1, together: str | None = None, **settings: Any) -> str:
        monkeypatch.setattr(store, "VERSION", version)
        answers = store.Store(tmp_path, {"root": "a"}).answers("b", plain | settings, together)
        return answers.file.name.partition(".")[0]

    names = [file(), file(2), file(backend="vllm"), file(dtype="float16"), file(together="c")]
    assert file() == names[0] and len(set(names)) == 5
    assert store.digest({"backend": "hf", "dtype": "x"}) == store.digest(
        {"dtype": "x", "backend": "hf"}
    )
    monkeypatch.setattr(store, "version", lambda package: "0.0.1")
    assert file() not in names


def test_an_adapter_is_not_the_same_on_another_base(tmp_path: Path) -> None:
    found = []
    for base in ("one", "two"):
        folder = tmp_path / base
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        facts = {"weights": {"root": "sha256:adapter"}}
        Manifest(
            base, "hash", {"stage": "sft"}, facts, parents={"model": Ancestor("m", "h", base)}
        ).write(folder)
        found.append(store.model_key(External(base, "hash", folder)))
    assert found[0]["root"] == found[1]["root"] and found[0] != found[1]


# --- one answer after another ---


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of decoded prompts for each time."""
    numbers: list[int] = []
    real = torch_backend.decode

    def counted(lm: Any, prefix: Any, rests: list[Any], *others: Any) -> None:
        numbers.append(len(rests))
        real(lm, prefix, rests, *others)

    monkeypatch.setattr(torch_backend, "decode", counted)
    return numbers


def evaluate(folder: Path, checkpoint: Path, data_root: Path, **knobs: Any) -> str:
    """Return the samples of MGSM in English."""
    knobs = {
        "languages": ["en"],
        "max_gen_toks": 4,
        "limit": 6,
        "dtype": "float32",
        "batch_size": 2,
    } | knobs
    shutil.rmtree(folder / "work", ignore_errors=True)
    stage.make(
        run_of(folder, checkpoint, data_root, asked("mgsm", 2), **knobs), folder / "work", Notes()
    )
    return (folder / "work/samples/mgsm.en.jsonl").read_text()


def test_a_killed_evaluation_resumes_at_the_next_question(
    tmp_path: Path, tiny: Path, data_root: Path, decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after three of six answers, the last one written in part.

    Four are computed, and samples are the same.
    """
    expected = evaluate(tmp_path / "whole", tiny, data_root)
    real = store.Answers.add

    def killed(self: store.Answers, *answer: Any) -> None:
        real(self, *answer)
        if len(self.found) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store.Answers, "add", killed)
        evaluate(tmp_path, tiny, data_root)
    (file,) = (tmp_path / "runs/.scores").glob("*.jsonl")
    file.write_text(file.read_text()[:-4])
    assert evaluate(tmp_path, tiny, data_root) == expected and decoded == [6, 6, 4]
    assert evaluate(tmp_path, tiny, data_root) == expected and decoded == [
        6,
        6,
        4,
    ]  # all are stored


@pytest.mark.parametrize(
    ("knobs", "left"),
    [({}, 3), ({"redo": True}, 6), ({"max_gen_toks": 5}, 6), ({"dtype": "bfloat16"}, 6)],
    ids=["a larger limit", "redo", "longer answers", "below float32"],
)
def test_answers_that_are_stored_are_not_computed_again(
    tmp_path: Path,
    tiny: Path,
    data_root: Path,
    decoded: list[int],
    knobs: dict[str, Any],
    left: int,
) -> None:
    evaluate(
        tmp_path,
        tiny,
        data_root,
        limit=3,
        **{name: knobs[name] for name in knobs if name == "dtype"},
    )
    evaluate(tmp_path, tiny, data_root, **knobs)
    assert decoded == [3, left]


def test_a_killed_evaluation_of_choices_resumes(
    tmp_path: Path, tiny: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likelihoods that were computed before the kill are not computed again.

    The others are of another batch, and differ in the last digits.
    """
    put: list[int] = []
    real, add = torch_backend.TorchBackend.loglikelihood, store.Answers.add

    def counted(self: Any, requests: list[Any], *others: Any) -> None:
        put.append(len(requests))
        real(self, requests, *others)

    def killed(self: store.Answers, *answer: Any) -> bool:
        if len(self.found) == 12:
            raise KeyboardInterrupt
        return add(self, *answer)

    def scored(folder: Path) -> list[float]:
        shutil.rmtree(folder / "work", ignore_errors=True)
        knobs = {"languages": ["en"], "dtype": "float32", "batch_size": 2}
        stage.make(
            run_of(folder, tiny, data_root, asked("belebele", 2), **knobs), folder / "work", Notes()
        )
        samples = read_jsonl(folder / "work/samples/belebele.en.jsonl")
        return [value for sample in samples for value in sample["loglikelihoods"].values()]

    monkeypatch.setattr(torch_backend.TorchBackend, "loglikelihood", counted)
    expected = scored(tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store.Answers, "add", killed)
        scored(tmp_path)
    found = scored(tmp_path)
    assert found == pytest.approx(expected, abs=1e-4) and len(found) == 28 and put == [28, 28, 16]


def test_several_write_at_once_and_read_what_all_wrote(tmp_path: Path) -> None:
    """Each to a file of its own. A kill leaves a line in part, which is not read."""
    kept = store.Store(tmp_path, {"root": "a"})
    one, two = (kept.answers("mgsm", {}, None) for _ in range(2))
    ask, other = ("generate_until", "What?", {"until": []}), ("loglikelihood", "What?", " 5")
    asked, weighed = store.digest(ask), store.digest(other)
    assert (
        one.add(asked, (" 5", False))
        and two.add(weighed, (-1.5, True))
        and not two.add(weighed, (-9.0, True))
    )
    assert one.file != two.file
    two.file.write_text("5\n[1, 2, 3]\n" + two.file.read_text() + '["b", ')
    found = kept.answers("mgsm", {}, None)
    assert (
        found.look_up(ask) == [" 5", False]
        and found.look_up(other) == [-1.5, True]
        and len(found.found) == 2
    )
    assert not store.Store(tmp_path, {"root": "a"}, fresh=True).answers("mgsm", {}, None).found
    assert not kept.answers("mgs", {}, None).found


def test_of_an_answer_that_was_computed_again_the_later_one_counts(tmp_path: Path) -> None:
    """redo=true reads nothing and writes again; files are named by chance."""
    request = ("generate_until", "What?", {"until": []})
    for number in range(6):
        fresh = store.Store(tmp_path, {"root": "a"}, fresh=True).answers("mgsm", {}, None)
        assert fresh.add(store.digest(request), (str(number), False))
        os.utime(fresh.file, ns=(number * 10**9, number * 10**9))
    assert store.Store(tmp_path, {"root": "a"}).answers("mgsm", {}, None).look_up(request) == [
        "5",
        False,
    ]
