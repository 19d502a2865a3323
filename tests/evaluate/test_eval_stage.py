"""A whole eval stage on a tiny model: what it writes, and what it refuses."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from made_up import Notes, asked, run_of, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.evaluate import before, metrics, stage
from pipeline.stages.rows import build


def test_a_stage_writes_scores_and_samples(
    data_root: Path, tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [asked("mgsm", 2), asked("belebele", 1), asked("global_mmlu", 1), asked("flores", 1)]
    run, notes = run_of(tmp_path, tiny, data_root, *tasks, max_gen_toks=8), Notes()
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    facts = stage.make(run, tmp_path / "work", notes)
    assert before == (
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )
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


def test_prompts_that_are_too_long_are_refused(data_root: Path, tmp_path: Path, tiny: Path) -> None:
    rows = [
        json.loads(line) for line in (data_root / "mgsm/en/test.jsonl").read_text().splitlines()
    ]
    rows[3]["question"] = "x" * 9000
    write_rows(data_root / "mgsm/en/test.jsonl", rows)
    knobs: dict[str, Any] = {"max_gen_toks": 4, "languages": ["en"]}
    with pytest.raises(PipelineError, match="mgsm_en_2shot: 1 of 10 prompts do not fit"):
        stage.make(
            run_of(tmp_path, tiny, data_root, asked("mgsm", 2), **knobs), tmp_path / "work", Notes()
        )


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ '' }}", "renders an empty prompt for a question of mgsm_en_0shot"),
        ("{% if false %}{{ messages }}{% endif %}", "renders an empty prompt"),
        ("{{ bos_token }} ", "renders an empty prompt"),
        (
            "{{ raise_exception('roles\n must alternate \\x1b[31m') }}",
            r"raises on the prompts .*roles must alternate",
        ),
        ("{{ ''.__class__.__mro__ }}", "raises on the prompts .*unsafe"),
        ("{{ messages[0].content + 1 }}", "raises on the prompts"),
    ],
)
def test_a_template_without_a_prompt_is_refused(
    template: str,
    problem: str,
    data_root: Path,
    tmp_path: Path,
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sentence before anything is scored, not a score of 0 or a traceback."""
    config = json.loads((tiny / "tokenizer_config.json").read_text())
    (tiny / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<s>"}))
    (tiny / "chat_template.jinja").write_text(template)
    run = run_of(
        tmp_path,
        tiny,
        data_root,
        asked("mgsm", 0),
        max_gen_toks=4,
        languages=["en"],
        chat_template=True,
    )
    with pytest.raises(PipelineError, match=problem) as error:
        stage.make(run, tmp_path / "work", Notes())
    assert str(error.value).isprintable() and len(str(error.value)) < 400
    assert "Traceback" not in capsys.readouterr().err


def test_a_chat_template_makes_turns_of_the_exemplars(
    data_root: Path, tmp_path: Path, tiny: Path
) -> None:
    run = run_of(
        tmp_path,
        tiny,
        data_root,
        asked("mgsm", 1),
        max_gen_toks=4,
        languages=["en"],
        chat_template=True,
    )
    with pytest.raises(
        PipelineError, match="chat template raises on the prompts of .*chat_template is not set"
    ):
        stage.make(run, tmp_path / "work", Notes())
    turns = "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    config = json.loads((tiny / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (tiny / "tokenizer_config.json").write_text(json.dumps(config))
    facts = stage.make(run, tmp_path / "work", Notes())
    assert facts["harness"]["chat_template"] is True
    prompt = json.loads((tmp_path / "work/samples/mgsm.en.jsonl").read_text().splitlines()[0])[
        "prompt"
    ]
    assert (
        prompt == "<user>Question: 1?\nStep-by-Step Answer:<assistant>So. The answer is 1."
        "<user>Question: test problem 0 in en\nStep-by-Step Answer:<assistant>"
    )


def test_spbleu_stands_beside_and_its_model_enters_the_hash(
    data_root: Path, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spm_model = tmp_path / "spm.model"
    spm_model.write_bytes(b"pieces")
    words = (
        f"stage=eval eval=flores_0shot checkpoint={tiny} data_root={data_root} languages=[en,qac]"
        " eval.max_gen_toks=4"
    )
    with_it = [*words.split(), f"runs_dir={tmp_path}", f"eval.spm_model={spm_model}"]
    run = build(compose(with_it))  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="eval.spm_model: SentencePiece is not installed"):
        monkeypatch.setattr(before, "find_spec", lambda name: None)
        stage.make(run, tmp_path / "work", Notes())
    monkeypatch.setattr(before, "find_spec", lambda name: name)
    monkeypatch.setattr(
        metrics, "spbleu", lambda references, responses, file: float(len(references))
    )
    facts = stage.make(run, tmp_path / "work", Notes())
    assert facts["scores"]["flores/en-qac/spbleu"] == 6
    moved = tmp_path / "moved.model"
    spm_model.rename(moved)
    again = [*words.split(), f"runs_dir={tmp_path}", f"eval.spm_model={moved}"]
    assert build(compose(again)).hash == run.hash != build(compose(words.split())).hash  # type: ignore[arg-type]
    moved.write_bytes(b"other pieces")
    assert build(compose(again)).hash != run.hash  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="eval.spm_model=.* is not a file"):
        build(compose(with_it))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bundle", "languages", "tasks"),
    [
        ("layer_swapping", "en sw bn te ja", "mgsm 8, belebele 5, flores 0, mbpp 0, global_mmlu 5"),
        ("unreasonable", "en sw bn te", "mgsm 2, belebele 5, global_mmlu 5"),
    ],
)
def test_the_bundles_are_the_papers(bundle: str, languages: str, tasks: str) -> None:
    composed: Any = compose(f"stage=eval eval={bundle} checkpoint=x".split())
    assert composed.languages == languages.split()
    assert ", ".join(f"{one.task} {one.num_fewshot}" for one in composed.eval.tasks) == tasks
    assert [one.task for one in composed.eval.tasks if one.where_possible] == (
        ["mbpp"] if "mbpp" in tasks else []
    )
    fewer: Any = compose(f"stage=eval eval={bundle} checkpoint=x languages=[en]".split())
    assert fewer.languages == ["en"]


@pytest.mark.parametrize("columns", [("prompt", "completion"), ("text",)])
def test_held_out_text_is_as_likely_as_torch_has_it(
    columns: tuple[str, ...], tmp_path: Path, tiny: Path
) -> None:
    """bits of pairs, which trainings join by a line feed, and of plain text.

    A list in a text stays text.
    """
    texts = [("Mji mkuu?", "Nairobi"), ("Orodha", "[1, 2]"), ("", "[3, 4]")]
    rows = [
        dict(zip(columns, pair[-len(columns) :], strict=True)) | {"side": "math"} for pair in texts
    ]
    write_rows(tmp_path / "held out/validation.jsonl", rows)
    run = run_of(
        tmp_path,
        tiny,
        tmp_path / "held out",
        asked("held_out", 0),
        dtype="float32",
        languages=["sw"],
    )
    facts = stage.make(run, tmp_path / "work", Notes())
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny).eval(),
        AutoTokenizer.from_pretrained(tiny),
    )
    begin, bits = tokenizer.bos_token_id or tokenizer.eos_token_id, []
    for prompt, completion in texts:
        prompt = prompt if "prompt" in columns else ""
        before = tokenizer(prompt).input_ids if prompt else [begin]
        whole = [
            *before,
            *tokenizer(("\n" if prompt else "") + completion, add_special_tokens=False).input_ids,
        ]
        with torch.no_grad():
            logits = torch.log_softmax(model(torch.tensor([whole])).logits[0].double(), -1)
        found = sum(float(logits[at - 1, whole[at]]) for at in range(len(before), len(whole)))
        bits.append(found / math.log(2))
    assert facts["scores"]["held_out/sw/bits"] == pytest.approx(sum(bits) / 3, abs=1e-3)
    (tmp_path / "held out/validation.jsonl").unlink()
    (tmp_path / "again").mkdir()
    with pytest.raises(
        PipelineError, match="held out has no validation.jsonl.* A data run with data.validation"
    ):
        stage.make(run, tmp_path / "again", Notes())
