"""Conversations keep what their turns hold.

What is left out is counted in the data card and in the plan.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Call, Patch
from tiny_words import FEW

from pipeline.config.data import Source
from pipeline.data.load import example_of
from pipeline.data.sources import words_of

ASK, TELL = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}
MORE, LAST = {"role": "user", "content": "And 3?"}, {"role": "assistant", "content": "7."}
EMPTY = {"role": "assistant", "content": ""}
PLAIN = {"prompt": "2 + 2?", "completion": "4."}
QUIET = ("runs_dir=runs", "tracking.mode=disabled")


def read(*turns: dict[str, Any], most: int | None = None) -> Any:
    """Return the example of a conversation."""
    source = Source(file="talk.jsonl", rows="conversation", column="talk", turns=most)
    row = {"talk": list(turns)}
    return example_of(row, source, {"talk": True})


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "name"])
def test_every_key_of_a_turn_is_kept(key: str) -> None:
    answer = TELL | {key: "Adding gives 4."}
    example = read(ASK, answer)
    assert example == PLAIN | {"messages": [ASK, answer]}
    assert "Adding gives 4." in words_of(example)
    assert read(ASK, TELL | {key: None}) == PLAIN  # as parquet fills it


def test_turns_of_one_speaker_are_joined_where_nothing_is_lost() -> None:
    example = read(ASK, MORE, TELL)
    assert example == {"prompt": "2 + 2?\n\nAnd 3?", "completion": "4."}
    named = [ASK | {"name": "Ada"}, MORE | {"name": "Ben"}, TELL]
    assert read(*named)["messages"] == named


@pytest.mark.parametrize(("number", "text"), [(4, "4"), ("4.50", "4.50"), (0, "0")])
def test_a_number_is_text(number: Any, text: str) -> None:
    example = read(ASK, TELL | {"content": number}, MORE, LAST)
    assert example["prompt"] == f"2 + 2?\n\n{text}\n\nAnd 3?"


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        ([TELL, ASK, TELL], [ASK, TELL]),  # a greeting
        ([ASK, TELL, MORE, EMPTY, MORE, LAST], [ASK, TELL]),  # an empty answer in the middle
        ([ASK, TELL, MORE], [ASK, TELL]),  # a question without an answer
        ([ASK, TELL, MORE, LAST | {"weight": 0}], [ASK, TELL]),
        ([ASK, TELL | {"weight": 0}, MORE, LAST], [ASK, TELL | {"weight": 0}, MORE, LAST]),
        ([ASK, TELL, MORE, LAST], [ASK, TELL, MORE, LAST]),
    ],
)
def test_turns_without_an_answer_to_train_on_are_left_out(
    turns: list[Any], kept: list[Any]
) -> None:
    assert (read(*turns).get("messages") or [ASK, TELL]) == kept


def test_turns_that_nobody_asks_for_are_not_left_out() -> None:
    assert read(ASK, TELL, MORE, LAST, most=1) == PLAIN
    assert read(LAST, ASK, TELL, MORE, LAST, most=1) == PLAIN


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": "0.0"}, {"train": False}])
def test_answers_that_are_not_to_be_trained_on(mark: dict[str, Any]) -> None:
    assert read(ASK, TELL | mark) == "not_trained"
    assert read(ASK, EMPTY) == "empty"


# --- trained on ---

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.thinking %}<{{ m.thinking }}> {% endif %}{{"
    " m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}{% if"
    " add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def chat(base: Path, tmp_path: Path, monkeypatch: Patch) -> list[str]:
    """Return the command of a training on talk.jsonl, with a template that writes `thinking`."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, tmp_path / "base")
    for record in ("manifest.json", "world.json"):
        (tmp_path / "base" / record).unlink(missing_ok=True)
    (tmp_path / "base/chat_template.jinja").write_text(TEMPLATE)
    rows = "expert.sources.own={url: ./talk.jsonl, rows: conversation, column: talk}"
    return [
        "expert=own",
        "model=trained",
        "model.path=./base",
        rows,
        *FEW,
        *QUIET,
        "data.benchmarks=none",
    ]


def write(*talks: list[dict[str, Any]]) -> None:
    Path("talk.jsonl").write_text("".join(json.dumps({"talk": talk}) + "\n" for talk in talks))


def several(*turns: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Eight conversations that differ in their first question."""
    return [[{"role": "user", "content": f"{n} + 2?"}, *turns] for n in range(8)]


def test_the_thought_is_trained_on_and_other_keys_are_counted(chat: list[str], call: Call) -> None:
    write(*several(TELL | {"thinking": "Adding.", "mood": "calm"}))
    done = call("stage=sft", "sft.template=chat", *chat, status=0)
    assert (
        "sft.template=chat does not write mood of 8 turns" in done.err
        and "thinking" not in done.err
    )
    row = json.loads((Path(done.out.strip()) / "rows.jsonl").read_text().splitlines()[0])
    assert "assistant: <Adding.> 4.</s>" in row["text"]
    trained = [token for token in row["labels"] if token != -100]
    assert len(trained) < len(row["input_ids"])
    plain = call("stage=sft", *chat, status=0)
    assert "sft.template=plain does not write thinking of 8 turns" in " ".join(plain.err.split())


def test_the_card_counts_what_is_left_out(chat: list[str], call: Call) -> None:
    write(*several(TELL), [TELL, MORE, LAST], [ASK, TELL | {"weight": 0}])
    folder = Path(call("stage=sft", "sft.template=chat", *chat, status=0).out.strip())
    (data,) = folder.parent.glob("data-*")
    card = (data / "data_card.md").read_text()
    assert "weight: 0 or train: false" in card
    facts = json.loads((data / "manifest.json").read_text())["facts"]["counts"]["own"]
    assert (facts["not_trained"], facts["taken"]) == (1, 9)


def test_a_marked_answer_is_no_answer_to_train_all_turns_on(chat: list[str], call: Call) -> None:
    write(*several(TELL | {"weight": 0}, MORE, LAST))
    call("stage=sft", "sft.template=chat", *chat, status=0)
    refused = call("stage=sft", "sft.template=chat", "sft.loss_on=all", *chat, status=1).err
    assert "A turn has weight: 0 or train: false, but sft.loss_on=all trains on it" in refused
