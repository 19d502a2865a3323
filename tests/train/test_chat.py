"""Chat templates.

Those of real models pass with the loss on the response and its end, broken ones are refused.
"""

import json
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from tiny import model, stage
from transformers import AutoTokenizer

from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.models.load import with_template_variables
from pipeline.train.examples import check_rows, datasets_of
from pipeline.train.load import make_bpe
from pipeline.train.stage import check_early
from pipeline.train.trainer import Trainer, trainer_arguments

SHIPPED = Path(trl.__file__).parent / "chat_templates"  # the models' own, word by word
# as Falcon3 writes it: the end of sequence after a response alone, nothing before the first turn
FALCON3 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + '\n' }}{% else"
    " %}{{ '<|assistant|>\n' + m.content + eos_token }}{% if not loop.last %}{{ '\n' }}{% endif"
    " %}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{%"
    " endfor %}"
)
REAL = {  # template, end of sequence, the marks around it
    "llama3": ("<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"]),
    "llama3_1": ("<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"]),
    "llama3_2": ("<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"]),
    "gptoss": ("<|return|>", ["<|start|>", "<|end|>", "<|message|>", "<|channel|>"]),
    "qwen3_5_think": ("<|im_end|>", ["<|im_start|>", "<think>", "</think>"]),
    "qwen2_5": ("<|im_end|>", ["<|im_start|>"]),
    "qwen3": ("<|im_end|>", ["<|im_start|>", "<think>", "</think>"]),
    "cohere": (
        "<|END_OF_TURN_TOKEN|>",
        ["<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"],
    ),
    "phi3": ("<|endoftext|>", ["<|user|>", "<|assistant|>", "<|end|>"]),
    "falcon3": ("<|endoftext|>", ["<|user|>", "<|assistant|>"]),
}
ROWS = [
    {
        "prompt": f"  Mia has {n} cups. How many? \n",
        "completion": f"\n{n} + 0 = {n}.\nThe answer is {n}.  ",
    }
    for n in range(8)
]
recipe = partial(Sft, name="full", template="chat", seq_length=512, batch_size=1)


def tokenizer(template: str, end: str = "</s>", marks: list[str] | None = None) -> Any:
    made = make_bpe([{"text": row["prompt"] + row["completion"]} for row in ROWS], 300)
    made.add_special_tokens({"eos_token": end, "additional_special_tokens": marks or []})
    made.chat_template = template
    return made


def real_tokenizer(name: str) -> Any:
    text = FALCON3 if name == "falcon3" else (SHIPPED / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer(text, *REAL[name])


def trained_on(rows: list[dict[str, Any]], made: Any, folder: Path, **knobs: Any) -> Any:
    sft = recipe(**knobs)
    args = trainer_arguments(stage(sft), False, False, folder)
    of = model(vocab_size=len(made), attn_implementation="sdpa")
    return Trainer(
        model=of,
        args=args,
        train_dataset=datasets_of(rows, sft, ["all"]),
        processing_class=made,
        sft=sft,
        parts={"all": []},
    ).train_dataset


@pytest.mark.parametrize("name", REAL)
def test_templates_of_real_models_pass(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = real_tokenizer(name)
    check_rows(ROWS, made, recipe())
    assert capsys.readouterr().err == ""
    trained = trained_on(ROWS, made, tmp_path)
    assert len(trained) == len(ROWS)
    for row, labels in zip(ROWS, trained["labels"], strict=True):
        learnt = made.decode([token for token in labels if token != -100])
        answer, _, rest = learnt.partition(REAL[name][0])
        assert row["completion"].strip() in answer and rest.strip() == ""
        assert row["prompt"].strip() not in learnt


TURN = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% if m.role == 'assistant' %}{{"
    " '</s>' }}{% endif %}"
)
ASK = "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
OTHERWISE = (
    "does not write the prompt as in generation before the response, so other tokens would be"
    "|which would not be trained on"
)
ENDLESS = "does not end a response with </s> alone, where the model should stop. Correct it, or use"
BROKEN = {
    "prompt_differs": (
        "{% if add_generation_prompt %}Answer it! {% endif %}" + TURN + "{% endfor %}" + ASK,
        OTHERWISE,
    ),
    "another_generation_prompt": (
        TURN + "{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}",
        OTHERWISE,
    ),
    "without_end": (TURN.replace("</s>", "<end>") + "{% endfor %}" + ASK, ENDLESS),
    "end_after_the_prompt_alone": (
        TURN.replace("== 'assistant'", "== 'user'") + "{% endfor %}" + ASK,
        ENDLESS,
    ),
    "header_after_the_end": (
        TURN + "{% endfor %}[assistant]",
        f"{OTHERWISE}|{ENDLESS}",
    ),  # whether asked for or not
    "header_after_the_last_end": (
        TURN + "{% if loop.last and m.role == 'assistant' %}[user]{% endif %}{% endfor %}" + ASK,
        ENDLESS,
    ),
    "drops_the_assistant": (
        "{% for m in messages if m.role == 'user' %}{{ m.content + '</s>' }}{% endfor %}" + ASK,
        OTHERWISE,
    ),
    "drops_the_user": (
        "{% for m in messages if m.role == 'assistant' %}{{ '[assistant]' + m.content + '</s>' }}{%"
        " endfor %}" + ASK,
        OTHERWISE,
    ),
    "raises": (
        "{{ raise_exception('Conversation roles must alternate') }}",
        (
            r"raises on .* \(Conversation roles must alternate\). Correct it, or use"
            r" sft.template=plain"
        ),
    ),
    "raises_of_itself": ("{{ 1 / 0 }}", r"raises on .* \(division by zero\). Correct it"),
    "does_not_parse": ("{% for m in messages %}", "raises on "),
    "asks_for_what_is_not_there": ("{{ messages[0].who.name }}", "raises on "),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_broken_template_is_refused_by_its_file(name: str, file: str, tmp_path: Path) -> None:
    template, told = BROKEN[name]
    made = tokenizer("{{ messages }}")
    made.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    if file == "chat_template.jinja":
        (tmp_path / file).write_text(template)
    else:
        config = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps(config | {"chat_template": template}))
    made = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(PipelineError, match=told) as refused:
        check_rows(ROWS, made, recipe())
    sentence = str(refused.value)
    assert (
        sentence.startswith(f"row 1 of train.jsonl: The chat template of {tmp_path / file} ")
        and "\n" not in sentence
    )
    assert sentence.endswith("or use sft.template=plain.")


@pytest.mark.parametrize("at", [0, 24, 299])
@pytest.mark.parametrize("loss_on", ["response", "all"])
def test_every_row_is_rendered(at: int, loss_on: str) -> None:
    """DeepSeek's template drops text before </think>, and Gemma's refuses a system turn."""
    cut = TURN.replace("+ m.content", "+ m.content.split('</think>')[-1]") + "{% endfor %}" + ASK
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    rows = [dict(ROWS[n % len(ROWS)]) for n in range(300)]
    check_rows(rows, tokenizer(cut), recipe(loss_on=loss_on))
    thought = [*rows]
    thought[at] = rows[at] | {"completion": "<think>so</think>" + rows[at]["completion"]}
    with pytest.raises(
        PipelineError, match=rf"^row {at + 1} of train.jsonl: .* does not write all of"
    ):
        check_rows(thought, tokenizer(cut), recipe(loss_on=loss_on))
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    rows[at] = rows[at] | {"messages": turns}
    with pytest.raises(PipelineError, match=rf"^row {at + 1} of validation.jsonl: .*no system"):
        check_rows(
            rows,
            tokenizer(strict + TURN + "{% endfor %}" + ASK),
            recipe(loss_on=loss_on),
            of="validation.jsonl",
        )


def test_an_end_that_the_generation_config_names_is_one(tmp_path: Path) -> None:
    """As Gemma's, whose tokenizer ends with <eos> and whose turns end with <end_of_turn>."""
    made = tokenizer(
        (SHIPPED / "gemma.jinja").read_text(), "<eos>", ["<start_of_turn>", "<end_of_turn>"]
    )
    with pytest.raises(PipelineError, match="does not end a response with <eos> alone"):
        check_rows(ROWS, made, recipe(), tmp_path)
    ends = [made.eos_token_id, made.convert_tokens_to_ids("<end_of_turn>")]
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(
        PipelineError, match=r"generation_config.json holds a JSON list, not an object"
    ):
        check_rows(ROWS, made, recipe(), tmp_path)
    for named in (ends, ends[1]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        check_rows(ROWS, made, recipe(), tmp_path)


def test_with_the_loss_on_all_the_prompt_may_differ() -> None:
    check_rows(ROWS, tokenizer(BROKEN["prompt_differs"][0]), recipe(loss_on="all"))


def test_a_template_that_prints_the_date_prints_the_one_that_is_given(tmp_path: Path) -> None:
    """Llama 3.2's asks for today's: one run hash would stand for other weights every day."""

    def learnt_from(date: str | None) -> str:
        made = real_tokenizer("llama3_2")
        if date:
            with_template_variables(made, date)
        return made.decode(trained_on(ROWS[:1], made, tmp_path)[0]["input_ids"])

    assert "Today Date: 26 Jul 2024" in learnt_from(Sft(name="x").template_date)
    assert "Today Date: 01 Feb 2023" in learnt_from("2023-02-01")
    assert f"Today Date: {datetime.now().strftime('%d %b %Y')}" in learnt_from(None)
    with pytest.raises(PipelineError, match="template_date=26 Jul 2024 is not a date. Give a date"):
        learnt_from("26 Jul 2024")


def test_variables_of_a_template_are_those_that_transformers_gives_it(tmp_path: Path) -> None:
    """As enable_thinking=False of Qwen 3.

    A template with a variable, trained on as apply_chat_template renders it.
    """
    text = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    text = "{% if enable_thinking is defined and not enable_thinking %}<quick>{% endif %}" + text
    stock, ours = tokenizer(text), tokenizer(text)
    turns = [
        {"role": "user", "content": ROWS[0]["prompt"]},
        {"role": "assistant", "content": ROWS[0]["completion"]},
    ]
    expected = stock.apply_chat_template(turns, tokenize=False, enable_thinking=False)
    with_template_variables(ours, "2024-07-26", {"enable_thinking": False})
    learnt = ours.decode(trained_on(ROWS[:1], ours, tmp_path)[0]["input_ids"])
    assert learnt == expected and expected.startswith("<quick>")


TALKS = [
    {
        "prompt": "flat",
        "completion": "flat too",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"Add {n} and 1?"},
            {"role": "assistant", "content": f"{n + 1}."},
            {"role": "user", "content": "And one more?"},
            {"role": "assistant", "content": f"{n + 2}!"},
        ],
    }
    for n in range(3)
]
OF_TRL = ["llama3", "qwen2_5", "qwen3", "cohere", "phi3"]  # with training templates of TRL's


@pytest.mark.parametrize("name", OF_TRL)
@pytest.mark.parametrize("loss_on", ["response", "assistant_turns"])
def test_conversations_stay_turns(
    name: str, loss_on: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss is on the last answer and its end, or on all of them.

    The trainer has the rows that were measured.
    """
    made = real_tokenizer(name)
    rows = [*TALKS, *ROWS[:2]]
    check_rows(rows, made, recipe(loss_on=loss_on))
    assert capsys.readouterr().err == ""
    trained = trained_on(rows, made, tmp_path, loss_on=loss_on)
    assert len(trained) == len(rows)
    for n, (ids, labels) in enumerate(
        zip(trained["input_ids"][:3], trained["labels"][:3], strict=True)
    ):
        whole, learnt = made.decode(ids), made.decode([token for token in labels if token != -100])
        assert "Be brief." in whole and "And one more?" in whole and "flat" not in whole
        assert not any(text in learnt for text in ("Be brief.", "Add", "And one more?"))
        assert f"{n + 2}!" in learnt and (f"{n + 1}." in learnt) == (loss_on == "assistant_turns")
        stop = "<|end|>" if name == "phi3" else REAL[name][0]
        assert learnt.count(stop) >= (2 if loss_on == "assistant_turns" else 1)


@pytest.mark.parametrize("name", ["llama3_1", "qwen2_5"])
def test_tools_of_one_row_are_not_in_another(name: str, tmp_path: Path) -> None:
    """Llama 3.1's template asks whether a message has the key tool_calls, not what it says."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ask, answer = (
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "It is 2."},
    )
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = {"role": "tool", "content": "2", "name": "add", "tool_call_id": "1"}
    talk = {"prompt": "1 + 1?", "completion": "It is 2.", "messages": [ask, calls, tools, answer]}
    made = real_tokenizer(name)
    check_rows([*ROWS, talk], made, recipe())
    trained = trained_on([*ROWS, talk], made, tmp_path)
    assert '"name": "add"' in made.decode(trained["input_ids"][-1])
    assert (
        made.decode([token for token in trained["labels"][-1] if token != -100])
        .strip()
        .startswith("It is 2.")
    )


@pytest.mark.parametrize("loss_on", ["response", "all", "assistant_turns"])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "falcon3", "phi3"])
def test_rows_that_are_cut_are_counted_as_trl_tokenizes_them(
    name: str, loss_on: str, tmp_path: Path
) -> None:
    made = real_tokenizer(name)
    if loss_on == "assistant_turns" and name == "falcon3":
        return
    rows = [
        {"prompt": "How many? " * asked, "completion": "It is 3. " * told}
        for asked, told in ((1, 1), (1, 30), (30, 1))
    ] * 2
    lengths = [
        len(ids)
        for ids in trained_on(rows, made, tmp_path, loss_on=loss_on, seq_length=4096)["input_ids"]
    ]
    limit = sorted(lengths)[0] + 40
    trained = trained_on(rows, made, tmp_path, loss_on=loss_on, seq_length=limit)
    cut, lost = check_rows(rows, made, recipe(loss_on=loss_on, seq_length=limit))
    assert cut == sum(length > limit for length in lengths) == 4
    assert len(trained) == len(rows) - len(lost)
    assert lost == ([] if loss_on == "all" else [2, 5])


@pytest.mark.parametrize("loss_on", ["response", "all", "assistant_turns"])
def test_each_row_is_rendered_once_before_training(
    loss_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What checks the template and what counts the cut rows look at one text."""
    made = real_tokenizer("qwen2_5")
    stock, written = made.apply_chat_template, []

    def record(turns: Any, **knobs: Any) -> Any:
        written.append(turns)
        return stock(turns, **knobs)

    monkeypatch.setattr(made, "apply_chat_template", record)
    run: Any = SimpleNamespace(config=stage(recipe(loss_on=loss_on, seq_length=100)))
    check_early(run, TALKS[:2], TALKS[2:], made, None)
    assert [written.count(talk["messages"]) for talk in TALKS] == [1, 1, 1]


MARKS = (
    "does not mark the assistant's turns and their ends by {% generation %} and {% endgeneration"
    " %}. Correct it"
)


def test_turns_that_cannot_be_trained_on_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PipelineError, match=MARKS):
        check_rows(TALKS, tokenizer(TURN + "{% endfor %}" + ASK), recipe(loss_on="assistant_turns"))
    marked = (
        TURN.replace("+ m.content }}", "}}{% generation %}{{ m.content }}{% endgeneration %}")
        + "{% endfor %}"
    )
    with pytest.raises(PipelineError, match=MARKS):
        check_rows(TALKS, tokenizer(marked + ASK), recipe(loss_on="assistant_turns"))
    plain = recipe(template="plain")
    check_rows(TALKS, tokenizer(FALCON3), plain)
    assert "sft.template=plain omits 3 system messages" in capsys.readouterr().err
    with_tools = [{**TALKS[0], "messages": [{"role": "tool", "content": "4"}]}]
    with pytest.raises(
        PipelineError,
        match=("sft.template=plain cannot express tool turns, .* Use sft.template=chat"),
    ):
        check_rows(with_tools, tokenizer(FALCON3), plain)
