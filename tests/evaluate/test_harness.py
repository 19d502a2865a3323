"""Scores against answers that are known beforehand, and a whole eval stage on a tiny model."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import sacrebleu
import torch
from made_up import Notes, Scripted, asked, choice, needs_real_data, run_of, write_rows

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.evaluate import metrics
from pipeline.evaluate import records as scored_rows
from pipeline.evaluate import stage as harness
from pipeline.evaluate.tasks import task_definitions
from pipeline.languages import TEN
from pipeline.study.stages import build


def scored(lm: Any, data_root: Path, folder: Path, task: Any, codes: tuple[str, ...] = ("qac",), **kwargs: Any) -> Any:
    limit = kwargs.pop("limit", None)
    definitions = task_definitions([task], codes, data_root, folder, **kwargs)
    return harness.score(lambda: lm, definitions, harness.load_tasks(definitions), choice(task, limit=limit))


def value(scores: Any, metric: str, **keys: Any) -> Any:
    (row,) = [
        row
        for row in scores.rows
        if row["metric"] == metric and all(row[key] == wanted for key, wanted in keys.items())
    ]
    return row["value"]


def number_of(prompt: str) -> int:
    return int(re.findall(r"problem (\d+)", prompt)[-1])


def test_the_share_that_is_right_is_the_score(data_root: Path, tmp_path: Path) -> None:
    def answer(prompt: str) -> str:
        i = number_of(prompt)
        if i < 4:  # right, as asked
            return f" So. The answer is {10 + i}."
        if i < 6:  # right, but not in the words of the exemplars
            return f" It makes {10 + i}"
        return " I do not know." if i < 9 else " The answer is 77."

    scores = scored(Scripted(answer), data_root, tmp_path / "tasks", asked("mgsm", 2))
    assert value(scores, "exact_match", filter="flexible-extract") == 0.6
    assert value(scores, "exact_match", filter="strict-match") == 0.4
    assert value(scores, "unparsed") == 0.3
    first = scores.rows[0]
    assert (first["metric"], first["filter"], first["n"], first["num_fewshot"]) == (
        "exact_match",
        "flexible-extract",
        10,
        2,
    )
    assert first["stderr"] == pytest.approx((0.6 * 0.4 / 9) ** 0.5)
    samples = scores.samples["mgsm_qac_2shot"]
    assert [sample["correct"] for sample in samples] == [True] * 6 + [False] * 4
    assert [samples[i]["extracted"] for i in (0, 7, 9)] == ["10.", "[invalid]", "77."]
    assert samples[0]["target"] == "10" and samples[0]["response"] == " So. The answer is 10."


@needs_real_data
def test_the_share_that_is_right_of_the_real_problems(real_data: Path, tmp_path: Path) -> None:
    lines = (real_data / "mgsm/sw/test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    right = {row["question"]: row["answer_number"] for row in rows[:100]}

    def answer(prompt: str) -> str:
        question = prompt.split("Swali: ")[-1].split("\nJibu la")[0]
        return f" Jibu ni {right[question]}. Swali: 7" if question in right else " Sijui."

    scores = scored(Scripted(answer), real_data, tmp_path / "tasks", asked("mgsm", 8), ("sw",))
    assert [row["value"] for row in scores.rows] == [0.4, 0.4, 0.6]
    assert scores.rows[0]["n"] == 250


def test_limit_takes_the_first_questions(data_root: Path, tmp_path: Path) -> None:
    scores = scored(Scripted(), data_root, tmp_path / "tasks", asked("belebele", 3), limit=4)
    assert [sample["doc_id"] for sample in scores.samples["belebele_qac_3shot"]] == [3, 4, 5, 6]


def test_belebele_by_hand(data_root: Path, tmp_path: Path) -> None:
    # Always the second option; right where number % 4 == 1, which of the rows 5..8 holds for row 5 alone.
    lm = Scripted(weigh=lambda prompt, continuation: -1.0 if continuation == " B" else -2.0)
    scores = scored(lm, data_root, tmp_path / "tasks", asked("belebele", 5))
    assert (value(scores, "acc"), value(scores, "acc_norm")) == (0.25, 0.25)
    assert scores.rows[0]["metric"] == "acc" and scores.rows[0]["n"] == 4
    first = scores.samples["belebele_qac_5shot"][0]
    assert (first["doc_id"], first["target"], first["extracted"], first["correct"]) == (5, "B", "B", True)
    assert first["loglikelihoods"] == {"A": -2.0, "B": -1.0, "C": -2.0, "D": -2.0}


@pytest.mark.parametrize("shots", [0, 2])
def test_global_mmlu_by_hand(data_root: Path, tmp_path: Path, shots: int) -> None:
    # Always A: rows 0 (homes) and 4 (colors) of 3 homes and 5 colors.
    lm = Scripted(weigh=lambda prompt, continuation: -1.0 if continuation == " A" else -2.0)
    scores = scored(lm, data_root, tmp_path / "tasks", asked("global_mmlu", shots))
    found = {row["subject"]: (row["value"], row["n"]) for row in scores.rows}
    assert found == {None: (0.25, 8), "homes": (pytest.approx(1 / 3), 3), "colors": (0.2, 5)}


def test_flores_is_sacrebleu(data_root: Path, tmp_path: Path) -> None:
    def answer(prompt: str) -> str:
        return " the word number " + re.findall(r"number (\d) here", prompt)[-1] + " says here.\nmore"

    scores = scored(Scripted(answer), data_root, tmp_path / "tasks", asked("flores", 2), ("en", "qac"))
    responses = [f"the word number {i} says here." for i in range(6)]
    references = [[f"qac devtest says the word number {i} here." for i in range(6)]]
    into = {"pair": "en-qac"}
    assert value(scores, "chrf++", **into) == sacrebleu.corpus_chrf(responses, references, word_order=2).score
    assert value(scores, "bleu", **into) == sacrebleu.corpus_bleu(responses, references).score
    assert [(row["pair"], row["metric"]) for row in scores.rows[::2]] == [
        ("en-qac", "chrf++"),
        ("qac-en", "chrf++"),
    ]
    assert scores.rows[0]["language"] == "qac" and scores.rows[0]["stderr"] is None and scores.rows[0]["n"] == 6
    sample = scores.samples["flores_en-qac_2shot"][0]
    assert (sample["extracted"], sample["correct"]) == (responses[0], None)


def test_japanese_words_are_counted_where_the_word_list_is_there() -> None:
    pytest.importorskip("MeCab")
    assert metrics.bleu_ja_mecab([("猫が魚を食べた。", "猫が魚を食べた。")]) == pytest.approx(100)


@pytest.mark.parametrize(
    ("tokens", "text", "cut_off"),
    [
        ([5, 6, 7], "a b c", True),
        ([5, 6], "a b", False),
        ([5, 2, 5], "a", False),
        ([5, 6, 7], "a Question: b", False),
    ],
)
def test_an_answer_that_ran_out_of_tokens(tokens: list[int], text: str, cut_off: bool) -> None:
    assert metrics.ran_out(tokens, text, 3, ["Question:"], 2) is cut_off


def test_numbers_are_matched_as_a_person_reads_them(data_root: Path, tmp_path: Path) -> None:
    """Answers are 10 to 19. Read: 10.0, ১১, $12; then the last number of a worked answer; nothing of the rest."""
    answers = [" It is 10.0", " ১১", "$12.", "13 14 13", " none"] + [" 99"] * 5
    lm = Scripted(lambda prompt: answers[number_of(prompt)])
    task = asked("mgsm_direct", 0)
    definitions = task_definitions([task], ["qac"], data_root, tmp_path / "tasks")
    scores = harness.score(lambda: lm, definitions, harness.load_tasks(definitions), choice(task))
    beside = scored_rows.beside(definitions, scores.rows, scores.samples, None)
    found = {(row["metric"], row["filter"]): row["value"] for row in [*scores.rows, *beside]}
    assert found["numeric_match", "last-number"] == 0.4 and found["unparsed", "last-number"] == 0.1
    assert found["exact_match", "flexible-extract"] == 0.2 and found["unparsed", "flexible-extract"] == 0.2
    assert scores.samples["mgsm_direct_qac_0shot"][1]["number"] == "11"


def test_the_average_of_ten_languages_leaves_thai_out(data_root: Path, tmp_path: Path) -> None:
    for code in (*TEN[1:], "th"):
        shutil.copytree(data_root / "mgsm/en", data_root / "mgsm" / code)
    wrong = {code: index for index, code in enumerate(TEN)}
    seen: Counter[int] = Counter()

    def answer(prompt: str) -> str:
        """In the n-th language the first n answers are wrong; in Thai, asked for last, all are."""
        number = number_of(prompt)
        seen[number] += 1
        right = seen[number] <= len(TEN) and number >= wrong[TEN[seen[number] - 1]]
        return f" The answer is {10 + number}." if right else " 99"

    task, lm = asked("mgsm_en_cot", 0), Scripted(answer)
    definitions = task_definitions([task], [*TEN, "th"], data_root, tmp_path / "tasks")
    scores = harness.score(lambda: lm, definitions, harness.load_tasks(definitions), choice(task))
    beside = scored_rows.beside(definitions, scores.rows, scores.samples, None)
    (row,) = [
        row
        for row in beside
        if row["language"] == "ten languages" and row["filter"] == "flexible-extract" and row["metric"] == "exact_match"
    ]
    assert row["value"] == pytest.approx(sum(1 - n / 10 for n in range(10)) / 10)
    assert (row["n"], row["stderr"]) == (100, None)
    fewer = scored_rows.beside(definitions[1:], [r for r in scores.rows if r["language"] != "en"], scores.samples, None)
    assert not [row for row in fewer if row["language"] == "ten languages"]


# ------------------------------------------------------------------------------------------------- with weights


def test_a_stage_writes_scores_and_samples(
    data_root: Path, tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [asked("mgsm", 2), asked("belebele", 1), asked("global_mmlu", 1), asked("flores", 1)]
    run, notes = run_of(tmp_path, tiny, data_root, *tasks, max_gen_toks=8), Notes()
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    facts = harness.make(run, tmp_path / "work", notes)
    assert before == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert capsys.readouterr().out == ""
    report = json.loads((tmp_path / "work/scores.json").read_text())
    languages = [(row["task"], row["language"], row["pair"]) for row in report["rows"]]
    assert len(set(languages)) == 3 * 2 + 2
    assert notes.found == facts["scores"] and "mgsm/qac/exact_match" in notes.found
    assert 0 < facts["scores"]["mgsm/qac/cut_off"] <= 1  # random weights end an answer by luck only
    lines = (tmp_path / "work/samples/flores.en-qac.jsonl").read_text(encoding="utf-8").splitlines()
    keys = {
        "doc_id",
        "prompt",
        "target",
        "response",
        "extracted",
        "correct",
        "filter",
        "prompt_hash",
        "scores",
        "cut_off",
    }
    assert len(lines) == 6 and set(json.loads(lines[0])) == keys
    assert set(report["harness"]["task_hashes"]) == set(report["harness"]["versions"])


def test_a_prompt_that_does_not_fit_is_counted_and_refused(data_root: Path, tmp_path: Path, tiny: Path) -> None:
    run = run_of(tmp_path, tiny, data_root, asked("mgsm", 8), max_gen_toks=8000)
    with pytest.raises(PipelineError, match=r"mgsm_en_8shot: 10 of 10 prompts do not fit, .*eval.max_gen_toks=8000"):
        harness.make(run, tmp_path / "work", Notes())
    config = json.loads((tiny / "config.json").read_text()) | {"max_position_embeddings": 200}
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises(PipelineError, match=r"belebele_en_5shot: 4 of 4 prompts do not fit, .* fewer exemplars$"):
        harness.make(run_of(tmp_path, tiny, data_root, asked("belebele", 5)), tmp_path / "work2", Notes())


def test_prompts_that_may_be_too_long_leave_the_score(data_root: Path, tmp_path: Path, tiny: Path) -> None:
    rows = [json.loads(line) for line in (data_root / "mgsm/en/test.jsonl").read_text().splitlines()]
    rows[3]["question"] = "x" * 9000
    write_rows(data_root / "mgsm/en/test.jsonl", rows)
    knobs: dict[str, Any] = {"max_gen_toks": 4, "languages": ["en"]}
    with pytest.raises(PipelineError, match="mgsm_en_2shot: 1 of 10 prompts do not fit"):
        harness.make(run_of(tmp_path, tiny, data_root, asked("mgsm", 2), **knobs), tmp_path / "work", Notes())
    run = run_of(tmp_path, tiny, data_root, asked("mgsm", 2), **knobs, too_long=1)
    facts = harness.make(run, tmp_path / "work", Notes())
    report = json.loads((tmp_path / "work/scores.json").read_text())
    assert report["rows"][0]["n"] == 9 and facts["harness"]["too_long"] == {"mgsm_en_2shot": 1}
    lines = (tmp_path / "work/samples/mgsm.en.jsonl").read_text().splitlines()
    assert [json.loads(line)["doc_id"] for line in lines] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    with pytest.raises(PipelineError, match="1 of 10 prompts"):  # not found again either
        harness.make(run_of(tmp_path, tiny, data_root, asked("mgsm", 2), **knobs), tmp_path / "work", Notes())


def test_a_chat_template_makes_turns_of_the_exemplars(data_root: Path, tmp_path: Path, tiny: Path) -> None:
    run = run_of(tmp_path, tiny, data_root, asked("mgsm", 1), max_gen_toks=4, languages=["en"], chat_template=True)
    with pytest.raises(PipelineError, match="the checkpoint's tokenizer has none"):
        harness.make(run, tmp_path / "work", Notes())
    turns = "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    config = json.loads((tiny / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (tiny / "tokenizer_config.json").write_text(json.dumps(config))
    facts = harness.make(run, tmp_path / "work", Notes())
    assert facts["harness"]["chat_template"] is True
    prompt = json.loads((tmp_path / "work/samples/mgsm.en.jsonl").read_text().splitlines()[0])["prompt"]
    assert prompt == (
        "<user>Question: 1?\nStep-by-Step Answer:<assistant>So. The answer is 1."
        "<user>Question: test problem 0 in en\nStep-by-Step Answer:<assistant>"
    )


def test_a_model_that_never_stops_is_told_of(
    data_root: Path, tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, tiny, data_root, asked("mgsm", 0), max_gen_toks=3, languages=["en"])
    facts = harness.make(run, tmp_path / "work", Notes())
    assert facts["scores"]["mgsm/en/cut_off"] == 1
    assert "10 of 10 answers ran out of eval.max_gen_toks=3" in capsys.readouterr().err


def test_a_checkpoint_without_a_tokenizer_is_refused(data_root: Path, tmp_path: Path, tiny: Path) -> None:
    (tiny / "tokenizer.json").unlink()
    with pytest.raises(PipelineError, match="tiny has no tokenizer: copy that of its base"):
        harness.make(run_of(tmp_path, tiny, data_root, asked("mgsm", 0)), tmp_path / "work", Notes())


def test_a_tokenizer_without_an_end_is_refused(data_root: Path, tmp_path: Path, tiny: Path) -> None:
    config = json.loads((tiny / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tiny / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(PipelineError, match="has no eos_token, at which answers end"):
        harness.make(run_of(tmp_path, tiny, data_root, asked("mgsm", 0)), tmp_path / "work", Notes())


def test_spbleu_stands_beside_and_its_model_enters_the_hash(
    data_root: Path, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spm_model = tmp_path / "spm.model"
    spm_model.write_bytes(b"pieces")
    words = (
        f"stage=eval eval=flores_0shot checkpoint={tiny} data_root={data_root} languages=[en,qac] eval.max_gen_toks=4"
    )
    with_it = [*words.split(), f"runs_dir={tmp_path}", f"eval.spm_model={spm_model}"]
    run = build(compose(with_it))  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="eval.spm_model needs SentencePiece"):
        monkeypatch.setattr(harness, "find_spec", lambda name: None)
        harness.make(run, tmp_path / "work", Notes())
    monkeypatch.setattr(harness, "find_spec", lambda name: name)
    monkeypatch.setattr(metrics, "spbleu", lambda references, responses, file: float(len(references)))
    facts = harness.make(run, tmp_path / "work", Notes())
    assert facts["scores"]["flores/en-qac/spbleu"] == 6
    moved = tmp_path / "moved.model"
    spm_model.rename(moved)
    again = [*words.split(), f"runs_dir={tmp_path}", f"eval.spm_model={moved}"]
    assert build(compose(again)).hash == run.hash != build(compose(words.split())).hash  # type: ignore[arg-type]
    moved.write_bytes(b"other pieces")
    assert build(compose(again)).hash != run.hash  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="eval.spm_model=.* is no file"):
        build(compose(with_it))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bundle", "languages", "tasks"),
    [
        ("layer_swapping", "en sw bn te ja", "mgsm 8, belebele 5, flores 0, mbpp 0, global_mmlu 5"),
        ("unreasonable", "en sw bn te", "mgsm 2, belebele 5, global_mmlu 5"),
    ],
)
def test_the_bundles_are_the_papers(bundle: str, languages: str, tasks: str) -> None:
    stage: Any = compose(f"stage=eval eval={bundle} checkpoint=x".split())
    assert stage.languages == languages.split()
    assert ", ".join(f"{one.task} {one.num_fewshot}" for one in stage.eval.tasks) == tasks
    assert [one.task for one in stage.eval.tasks if one.where_possible] == (["mbpp"] if "mbpp" in tasks else [])
    fewer: Any = compose(f"stage=eval eval={bundle} checkpoint=x languages=[en]".split())
    assert fewer.languages == ["en"]


def test_vllm_is_handed_over(tiny: Path, tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, tiny, data_root, backend="vllm", dtype="bfloat16")
    with pytest.raises(PipelineError, match="eval.backend=vllm needs vLLM, which is not installed"):
        harness.refuse_early(run, [])
    given = {}
    stand_in = SimpleNamespace(VLLM=lambda **kwargs: given.update(kwargs))
    monkeypatch.setitem(sys.modules, "lm_eval.models.vllm_causallms", stand_in)
    harness.answering(run, lambda: None)  # type: ignore[arg-type,return-value]
    assert (given["pretrained"], given["dtype"]) == (str(tiny), "bfloat16")


def test_data_is_checked_before_weights_are_read(data_root: Path, tmp_path: Path) -> None:
    (data_root / "mgsm/qac/test.jsonl").unlink()
    with pytest.raises(PipelineError, match=r"qac/test.jsonl: put it there"):
        harness.make(run_of(tmp_path, tmp_path / "no weights", data_root, asked("mgsm", 0)), tmp_path / "work", Notes())


def test_a_folder_without_safetensors_is_refused(data_root: Path, tmp_path: Path, tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(PipelineError, match="only safetensors are read"):
        harness.make(run_of(tmp_path, tiny, data_root, asked("mgsm", 0)), tmp_path / "work", Notes())
