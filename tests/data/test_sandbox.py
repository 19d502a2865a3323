"""The small world: known truth, and nothing of a benchmark in a training file."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from pipeline.config.data import World
from pipeline.data import sandbox
from pipeline.data.sandbox.text import INSTRUCTIONS, MIX, corpus, document, instructions
from pipeline.data.sandbox.tokenizer import tokenizer
from pipeline.data.sandbox.world import CLONES, POOL, ConstructedWorld, lexicon, problem, reading, say, sentences
from pipeline.evaluate.reasoning import equations


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    sandbox.write(folder, World(items=20, dev_items=20, math_rows=300, language_rows=200, documents=400))
    return folder


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def english(text: str, language: str) -> str:
    """A clone's text in English words: what the lexicon says, backwards."""
    back = {ours: word for word, ours in lexicon(language, 0).items()}
    return re.sub(r"[a-z]+", lambda match: back.get(match.group(), match.group()), text)


def test_equations_are_true_and_lead_to_the_answer():
    draw = random.Random(3)
    for _ in range(500):
        told, equations, answer = problem(draw)
        for equation in equations:
            left, right = equation.rstrip(".").split(" = ")
            assert eval(left) == int(right), equation  # noqa: S307
        assert equations[-1].endswith(f"= {answer}.") and 0 <= answer <= 99
        assert told[-1] == "?"


def test_a_problem_worked_by_hand():
    world = ConstructedWorld(0)
    item = (
        [
            *"Mia has 8 apples .".split(),
            *"Mia gives 3 apples to Tom .".split(),
            *"how many apples does Mia have ?".split(),
        ],
        ["8 - 3 = 5."],
        5,
    )
    prompt, completion = world.problem_text(item, "en")
    assert (
        prompt
        == "Question: Mia has 8 apples. Mia gives 3 apples to Tom. how many apples does Mia have?\nStep-by-Step Answer:"
    )
    assert completion == "8 - 3 = 5. The answer is 5."


def test_reading_is_answered_by_the_statement_on_who_is_asked_for():
    draw = random.Random(4)
    for _ in range(300):
        told, question, options, right = reading(draw)
        assert len(set(options)) == 4
        name = next(word for word in question if word[0].isupper())
        statement = next(one.split() for one in " ".join(told).split(" . ") if one.startswith(name))
        assert options[right] in statement
        assert not set(options) - {options[right]} & set(told)


def test_the_curriculum_begins_with_letters_then_reading():
    texts = [row["prompt"] for row in corpus(ConstructedWorld(0), 200)]
    assert all(text.startswith("Q: ") and text.endswith("Answer:") for text in texts[:20])
    assert {text[:2] for text in texts[20:30]} == {"Q:", "P:"}
    assert any(text.startswith("Qac: ") or "\nQac:" in text for text in texts[30:])


@pytest.mark.parametrize("language", CLONES)
def test_a_clone_is_a_bijection_without_english_words(language: str):
    words = lexicon(language, 0)
    assert len(set(words.values())) == len(words) and not set(words) & set(words.values())
    assert words == lexicon(language, 0) and words != lexicon(language, 1)


def test_benchmarks_are_parallel_over_languages(written: Path):
    for name in (
        "mgsm/{}/test.jsonl",
        "belebele/{}/test.jsonl",
        "flores/{}/devtest.jsonl",
        "global_mmlu/{}/test.jsonl",
    ):
        base = rows(written / name.format("en"))
        for clone in CLONES:
            back = [
                json.loads(english(json.dumps(row), clone).replace(f'"{clone}"', '"en"'))
                for row in rows(written / name.format(clone))
            ]
            keys = ("question", "sentence", "flores_passage", "mc_answer1", "option_a", "answer_number")
            for theirs, ours in zip(back, base, strict=True):
                assert {key: theirs[key] for key in keys if key in theirs} == {
                    key: ours[key] for key in keys if key in ours
                }


def test_no_benchmark_item_is_in_a_training_file(written: Path):
    train = (written / "text/train.jsonl").read_text() + (written / "orca_math/train.jsonl").read_text()
    train += (written / "aya/train.jsonl").read_text()
    train = "\n".join(english(train, clone) for clone in ("en", *CLONES))
    for split in ("dev", "test"):
        for row in rows(written / f"mgsm/en/{split}.jsonl"):
            assert row["question"] not in train
        for row in rows(written / f"flores/en/{'dev' if split == 'dev' else 'devtest'}.jsonl"):
            assert row["sentence"] not in train
        for row in rows(written / f"belebele/en/{split}.jsonl"):
            assert f"{row['flores_passage']}\\nQ: {row['question']}" not in train


def test_larger_worlds_test_what_smaller_ones_kept_apart():
    """The base must not have read the items of a larger world: the pool is kept apart whatever is written."""
    world = ConstructedWorld(0)
    first = world.hold_out("problem", "test", POOL, problem)
    again = ConstructedWorld(0).hold_out("problem", "test", POOL, problem)
    assert first[:100] == again[:100] and len(first) == 2000


def test_no_math_in_low_resource_languages():
    assert {language for language, kind in MIX if kind == "problem"} == {"en", "qaa"}
    assert "problem" not in INSTRUCTIONS
    world = ConstructedWorld(0)
    for clone in CLONES:
        for prompt, completion in instructions(world, clone, 300):
            assert "Step-by-Step" not in prompt and "=" not in completion


def test_every_kind_of_document_survives_the_tokenizer():
    world, draw, ours = ConstructedWorld(0), random.Random(5), tokenizer()
    for language, kind in MIX:
        text = " ".join(document(world, kind, language, draw)).lstrip()
        assert ours.decode(ours(text).input_ids, skip_special_tokens=True) == text
    odd = "Hé llo 日本\n\n  12345 $3.50 It's"
    assert ours.decode(ours(odd).input_ids, skip_special_tokens=True) == odd


def test_a_hand_tokenised_example():
    ours = tokenizer()
    assert ours.tokenize("Question: Mia has 12 apples.\nStep-by-Step Answer:") == [
        "Question", ":", "▁Mia", "▁has", "▁12", "▁apples", ".", "\n", "Step-by-Step", "▁Answer", ":",
    ]  # fmt: skip
    word = lexicon("qac", 0)["apples"]
    assert ours.tokenize(f" {word}") == ["▁" + word[:2], word[2:]]
    assert ours("Mia").input_ids[0] == ours.bos_token_id


def test_prompts_and_answers_fit_the_demo():
    world, draw, ours = ConstructedWorld(0), random.Random(6), tokenizer()
    for make, text in ((problem, world.problem_text), (reading, world.reading_text)):
        for _ in range(300):
            prompt, completion = text(world.fresh(draw, make), "qac")
            assert len(ours(prompt).input_ids) < 120 and len(ours(" " + completion).input_ids) - 1 <= 24


def test_training_skips_what_is_held_out():
    world = ConstructedWorld(0)
    held = world.hold_out("sentences", "test", 50, sentences)
    draw = random.Random("0 sentences test")  # the very draws that were held out
    assert sentences(random.Random("0 sentences test")) == held[0]
    assert world.fresh(draw, sentences) not in held


def test_say_spaces_words_as_english_does():
    assert say(["how", "many", "?"], {}) == "how many?"
    assert say(["the", "fox", "is", "red", "."], {"the": "a", "fox": "b", "is": "c", "red": "d"}) == "a b c d."


def test_the_shipped_base_is_whole_small_and_of_this_world():
    """Its manifest's digests hold, it is at most 10 MB, and it speaks with the world's tokenizer."""
    from pipeline.runs.find import find
    from pipeline.runs.unchanged import check_unchanged

    base = find("package:data/sandbox_base", Path("runs"), "model.path")
    check_unchanged(base.folder)
    assert sum(path.stat().st_size for path in base.folder.iterdir()) < 10_000_000
    ours = json.loads(tokenizer().backend_tokenizer.to_str())
    shipped = json.loads((base.folder / "tokenizer.json").read_text())
    assert shipped["model"] == ours["model"] and shipped["normalizer"] == ours["normalizer"]


def test_problems_carry_the_equations_that_plans_are_compared_with(written: Path):
    for row in rows(written / "mgsm/qac/test.jsonl"):
        assert row["answer"] is None and row["equation_solution"].endswith(f"= {row['answer_number']}.")
        assert all(one.holds for one in equations(row["equation_solution"]))
