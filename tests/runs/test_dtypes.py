"""The dtype that a model is scored in.

Resolved when the run is built, one for all that is compared.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.compose import compose
from pipeline.config.stages import EvalStage
from pipeline.errors import PipelineError
from pipeline.evaluate.stage import in_its_dtype
from pipeline.models.checkpoint import header_bytes
from pipeline.runs.run import Parent, Run
from pipeline.stages.rows import build
from pipeline.tables.planned_runs import Planning

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


def model(folder: Path, *dtypes: str, config_dtype: str = "float32") -> Path:
    """Write a folder with one weight of each dtype. The dtype in config.json has no effect."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"num_hidden_layers": 28, "dtype": config_dtype})
    )
    tensors = {
        f"model.layers.{place}.mlp.up_proj.weight": (dtype, (2, 2))
        for place, dtype in enumerate(dtypes)
    }
    body = b"\0" * sum(4 * BYTES[dtype] for dtype in dtypes)
    (folder / "model.safetensors").write_bytes(header_bytes(tensors) + body)
    return folder


def evaluation(
    checkpoint: Any, tmp_path: Path, *words: str, known: dict[str, Parent] | None = None
) -> Run:
    asked = [
        "stage=eval",
        "eval=mgsm_2shot",
        "languages=[en]",
        f"checkpoint={checkpoint}",
        f"runs_dir={tmp_path}/runs",
    ]
    return build(compose([*asked, *words]), known)  # type: ignore[arg-type]


def planned(tmp_path: Path, *words: str, known: dict[str, Parent] | None = None) -> Run:
    return build(compose([f"runs_dir={tmp_path}/runs", *words]), known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("short", "dtype"), [("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16")]
)
def test_auto_is_what_the_headers_say(tmp_path: Path, short: str, dtype: str) -> None:
    folder = model(
        tmp_path / "model", short, short, config_dtype="bfloat16" if short == "F32" else "float32"
    )
    run = evaluation(folder, tmp_path)
    assert run.config.eval.dtype == dtype
    assert run.hash == evaluation(folder, tmp_path, f"eval.dtype={dtype}").hash
    assert (
        len(
            {
                evaluation(folder, tmp_path, f"eval.dtype={one}").hash
                for one in ("float32", "bfloat16")
            }
        )
        == 2
    )


def test_several_dtypes_need_one_to_be_named(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", "F32", "BF16")
    with pytest.raises(
        PipelineError, match=r"model holds bfloat16 and float32. Give eval.dtype=float32"
    ):
        evaluation(folder, tmp_path)
    assert evaluation(folder, tmp_path, "eval.dtype=float32").config.eval.dtype == "float32"
    with pytest.raises(PipelineError, match=r"double holds float64. Give eval.dtype=float32"):
        evaluation(model(tmp_path / "double", "F64"), tmp_path)


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ("sft=full", "float32"),
        ("sft=full sft.save_dtype=bfloat16", "bfloat16"),
        ("sft=full sft.weights=bfloat16 sft.optimizer=adamw_8bit", "bfloat16"),
        (
            "sft=full sft.weights=bfloat16 sft.optimizer=adamw_8bit sft.save_dtype=float32",
            "float32",
        ),
        (
            "sft=lora sft.weights=bfloat16",
            "float32",
        ),  # base and adapter are read together as float32
    ],
)
def test_a_training_that_is_not_made_yet(tmp_path: Path, words: str, dtype: str) -> None:
    expert = planned(tmp_path, "stage=sft", "expert=math", *words.split())
    known: dict[str, Parent] = {"expert": expert}
    assert evaluation("expert", tmp_path, known=known).config.eval.dtype == dtype
    other = planned(tmp_path, "stage=sft", "expert=sw", *words.split())
    both: dict[str, Parent] = {"math": expert, "sw": other}
    asked = ["merge=layer_swap", "merge.math=math", "merge.language=sw"]
    merge = planned(tmp_path, "stage=merge", *asked, known=both)
    assert evaluation("merge", tmp_path, known={"merge": merge}).config.eval.dtype == dtype
    live = ["stage=eval", "eval=mgsm_2shot", "languages=[en]", *asked]
    assert planned(tmp_path, *live, known=both).config.eval.dtype == dtype
    half = planned(tmp_path, *live, "merge.dtype=float16", known=both)
    assert half.config.eval.dtype == "float16"


def test_a_model_on_the_hub_by_the_lock_file(tmp_path: Path) -> None:
    free = evaluation("hub:org/name", tmp_path)
    assert free.config.eval.dtype == "auto"  # nothing here tells it
    models = {"org/name": {"revision": "abc", "files": {}, "dtypes": ["bfloat16"]}}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/hub.lock.json").write_text(
        json.dumps({"models": models, "datasets": {}, "urls": {}})
    )
    assert evaluation("hub:org/name", tmp_path).config.eval.dtype == "bfloat16"
    # what changes answers below float32 changes the hash where the dtype is not known, too
    assert (
        evaluation("hub:org/name", tmp_path, "eval.batch_size=8").hash
        != evaluation("hub:org/name", tmp_path).hash
    )


@pytest.mark.parametrize("knob", ["eval.batch_size=8", "eval.share_prefix=false"])
def test_what_rounds_otherwise_is_hashed_below_float32_alone(tmp_path: Path, knob: str) -> None:
    folder = model(tmp_path / "model", "BF16")
    assert evaluation(folder, tmp_path, knob).hash != evaluation(folder, tmp_path).hash
    exact = evaluation(folder, tmp_path, "eval.dtype=float32")
    assert evaluation(folder, tmp_path, "eval.dtype=float32", knob).hash == exact.hash
    null = evaluation(
        folder, tmp_path, "eval.batch_size=null"
    ).hash  # what memory holds, whose number is a fact
    assert (
        null
        == evaluation(folder, tmp_path).hash
        != evaluation(folder, tmp_path, "eval.batch_size=32").hash
    )


def test_weights_of_another_dtype_than_planned_are_refused(tmp_path: Path) -> None:
    run = evaluation(model(tmp_path / "model", "BF16"), tmp_path)
    assert in_its_dtype(run) is not run and in_its_dtype(run).config == run.config
    wrong = replace(run, config=replace(run.config, eval=replace(run.config.eval, dtype="float32")))
    with pytest.raises(
        PipelineError,
        match=r"planned in float32, but .* stored as bfloat16. Set eval.dtype=bfloat16",
    ):
        in_its_dtype(wrong)
    asked = replace(
        wrong, config=replace(wrong.config, as_stored=False)
    )  # a cast that was asked for
    assert in_its_dtype(asked).config.eval.dtype == "float32"


TABLE = """
name: mine
every: {{model: llama3.1_8b, model.path: {base}, eval.max_gen_toks: 4{more}}}
runs:
  base: {{checkpoint: {base}}}
  expert: {{stage: sft, expert: math, sft: full, sft.steps: 2}}
rows: {{base: base, expert: expert}}
columns: {{MGSM: {{in: en}}}}
score: {{eval: mgsm_2shot}}
"""


def test_a_table_of_several_dtypes_is_scored_in_float32(tmp_path: Path) -> None:
    """A base in bfloat16 and an expert trained in float32: one for all, which holds both.

    Or the one given.
    """
    base = model(tmp_path / "base", "BF16")
    for more, dtype in (("", "float32"), (", eval.dtype: bfloat16", "bfloat16")):
        (tmp_path / "mine.yaml").write_text(TABLE.format(base=base, more=more))
        asked = compose(["stage=table", f"table={tmp_path}/mine.yaml", f"runs_dir={tmp_path}/runs"])
        scored = [run for run in Planning.of(asked).targets() if isinstance(run.config, EvalStage)]  # type: ignore[arg-type]
        assert [run.config.eval.dtype for run in scored] == [dtype] * 2


def test_a_selection_compares_scores_of_one_dtype(tmp_path: Path) -> None:
    base = model(tmp_path / "base", "BF16")
    train = ["model=llama3.1_8b", f"model.path={base}", "expert=sw", "sft=full", "sft.steps=10"]
    expert = planned(tmp_path, "stage=sft", *train, "sft.snapshot_every=64")
    asked = [
        "stage=select",
        "select=layer_swapping_language",
        "checkpoints=[expert]",
        "languages=[sw]",
    ]
    with pytest.raises(PipelineError, match=r"bfloat16.*Set select.eval.dtype=float32 for all"):
        planned(tmp_path, *asked, known={"expert": expert})
    run = planned(tmp_path, *asked, "select.eval.dtype=float32", known={"expert": expert})
    model_of = {"chosen": run}
    assert evaluation("chosen", tmp_path, known=model_of).config.eval.dtype == "float32"  # type: ignore[arg-type]
