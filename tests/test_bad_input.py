"""Problems outside the program end in one sentence and leave no partial results."""

import builtins
import errno
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixture_types import Call, Patch
from tiny_words import FEW

from pipeline.config import conf
from pipeline.launch import in_process

ROW = '{"question": "1 + 1?", "answer": "2"}\n'


def left(runs_dir: Path) -> list[str]:
    """Return what looks finished: folders beside .work and .scores, and half-written scores."""
    halves = [path.name for path in runs_dir.glob(".scores/*.part")]
    return halves + [
        path.name for path in runs_dir.glob("*") if path.name not in (".work", ".scores")
    ]


def refused(told: SimpleNamespace, expected: str) -> None:
    assert told.status == 1 and told.out == ""
    sentences = [line for line in told.err.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1 and expected in sentences[0], told.err[-1500:]
    assert "Traceback" not in told.err


def lay(root: Path, text: str | bytes | None) -> str:
    """data_root with orca_math/train.jsonl."""
    file = root / "orca_math/train.jsonl"
    file.parent.mkdir(parents=True)
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(root)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "has no orca_math/train.jsonl. Put the file there"),
        ("", "has no rows. Choose another file"),
        ("\n\n", "train.jsonl) has no rows. Choose another file"),
        (b"\xff\xfe\x00", "train.jsonl is not readable as UTF-8 text ("),
        (
            '{"question": "1 + 1?", "ans',
            "train.jsonl, line 1 is not JSON (Unterminated string starting at)",
        ),
        (
            f'{ROW}\n{ROW}{{"question": "1 + 1?"\n',
            "train.jsonl, line 4 is not JSON (Expecting ',' delimiter)",
        ),
        (f"{ROW}[1, 2]\n", "train.jsonl, line 2 is a list. Write one object a line"),
        (
            '{"q": "1 + 1?", "a": "2"}\n',
            "train.jsonl) has no column question, answer. Its columns are q, a.",
        ),
        ('{"question": "1 + 1?", "answer": " "}\n', "all 1 rows are unusable"),
    ],
)
def test_bad_data_is_one_sentence(text: Any, expected: str, call: Call, tmp_path: Path) -> None:
    words = [
        "stage=data",
        "expert=math",
        f"data_root={lay(tmp_path / 'data', text)}",
        "tracking.mode=disabled",
    ]
    refused(call(*words, f"runs_dir={tmp_path}/runs"), expected)
    assert left(tmp_path / "runs") == []
    planned = call("stage=plan", *words[1:], f"runs_dir={tmp_path}/runs")
    assert expected in planned.err and planned.status == 1 and "Traceback" not in planned.err


# --- a full disk ---


@contextmanager
def full_disk(folder: Path, fails: int, number: int) -> Iterator[list[str]]:
    """Let the n-th write below a folder fail with a full disk or quota.

    Returns what was written so far.
    """
    written: list[str] = []

    def counted(real: Any) -> Any:
        def call(path: Any, *more: Any, **named: Any) -> Any:
            mode = named.get("mode", (*more, "r")[0]) if real is builtins_open else "w"
            if set(mode) & set("wax+") and str(path).startswith(str(folder)):
                written.append(str(path))
                if len(written) == fails:
                    raise OSError(number, os.strerror(number), str(path))
            return real(path, *more, **named)

        return call

    builtins_open = builtins.open
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (builtins, "open"),
            (io, "open"),
            (os, "rename"),
            (os, "replace"),
            (os, "mkdir"),
        ):
            patch.setattr(module, name, counted(getattr(module, name)))
        yield written


def every_write_fails_once(
    call: Call, words: list[str], runs_dir: Path, number: int = errno.ENOSPC
) -> int:
    """Run the command again with each write failing in turn, and return the number of writes."""
    for fails in range(1, 100):
        shutil.rmtree(runs_dir, ignore_errors=True)
        with full_disk(runs_dir, fails, number) as written:
            told = call(*words, f"runs_dir={runs_dir}")
        if len(written) < fails:
            assert told.status == 0, told.err
            return fails - 1
        if (
            told.status == 0
        ):  # where the folder was there already, or the run was published: nothing is lost
            continue
        refused(told, os.strerror(number))
        assert left(runs_dir) == []
    raise AssertionError("it never came through")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_for_any_write_of_data(number: int, call: Call, tmp_path: Path) -> None:
    words = [
        "stage=data",
        "expert=math",
        f"data_root={lay(tmp_path / 'data', ROW)}",
        "tracking.mode=disabled",
    ]
    assert every_write_fails_once(call, words, tmp_path / "runs", number) > 5


def test_no_space_for_a_write_of_a_merge(
    call: Call, tmp_path: Path, math_expert: Path, language_expert: Path
) -> None:
    words = [
        "stage=merge",
        "merge=soup",
        f"merge.experts=[{math_expert},{language_expert}]",
        "tracking.mode=disabled",
    ]
    assert every_write_fails_once(call, words, tmp_path / "runs") > 5


def test_no_space_for_any_write_of_an_evaluation(
    call: Call, tmp_path: Path, world: Path, math_expert: Path
) -> None:
    words = [
        "stage=eval",
        "eval=global_mmlu_0shot",
        f"checkpoint={math_expert}",
        f"data_root={world}",
        "eval.limit=1",
    ]
    assert every_write_fails_once(call, [*words, "tracking.mode=disabled"], tmp_path / "runs") > 5


def training(base: Path, world: Path, *more: str) -> list[str]:
    start = [
        "stage=sft",
        "model=trained",
        f"model.path={base}",
        "expert=math",
        f"data_root={world}",
    ]
    return [*start, "recipe=sandbox_math", *FEW, "tracking.mode=disabled", *more]


@pytest.mark.parametrize(
    ("wrapped", "number"), [(True, errno.ENOSPC), (True, errno.EDQUOT), (False, errno.EDQUOT)]
)
def test_no_space_for_the_weights(
    wrapped: bool,
    number: int,
    call: Call,
    base: Path,
    world: Path,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    """safetensors wraps what the system said in an error of its own."""
    import transformers
    from safetensors import SafetensorError

    def full(*_: Any, **__: Any) -> None:
        if wrapped:
            raise SafetensorError(
                f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"
            )
        raise OSError(number, os.strerror(number), "model.safetensors")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    runs_dir = tmp_path / "runs"
    refused(call(*training(base, world), f"runs_dir={runs_dir}"), os.strerror(number))
    assert [path.parent.name.partition("-")[0] for path in runs_dir.glob("*/manifest.json")] == [
        "data"
    ]


@pytest.mark.parametrize("where", ["init", "finish"])
def test_no_space_for_tracking_ends_no_run(
    where: str, call: Call, tmp_path: Path, monkeypatch: Patch
) -> None:
    import wandb

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run.wandb")

    stand_in = SimpleNamespace(
        finish=full, log=lambda *_, **__: None, summary={}, log_artifact=lambda *_: None
    )
    monkeypatch.setattr(wandb, "init", full if where == "init" else lambda **_: stand_in)
    words = [
        "stage=data",
        "expert=math",
        f"data_root={lay(tmp_path / 'data', ROW)}",
        f"runs_dir={tmp_path}/runs",
    ]
    told = call(*words)
    assert told.status == 0 and Path(told.out.strip()).is_dir()
    assert (
        told.err.count("warning: W&B ") == 1 and "No space left on device: 'run.wandb'" in told.err
    )


# --- models and training ---


def test_a_loss_that_is_no_number_stops_the_training(
    call: Call, base: Path, world: Path, tmp_path: Path
) -> None:
    huge = ["sft.learning_rate=1e20", "sft.steps=6", "sft.max_grad_norm=1e30"]
    refused(
        call(*training(base, world, *huge), f"runs_dir={tmp_path}/runs"), "Lower sft.learning_rate"
    )
    assert [name for name in left(tmp_path / "runs") if "full" in name] == []


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        (16, "lacks model.layers.14.input_layernorm.weight and 17 more tensors"),
        (4, "holds model.layers.10."),
    ],
)
def test_a_base_of_another_depth(
    layers: int, told: str, call: Call, base: Path, world: Path, tmp_path: Path
) -> None:
    """from_pretrained would draw the missing layers at random, or pass over the others."""
    other, here = tmp_path / "other", [f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]
    shutil.copytree(base, other)
    (other / "manifest.json").unlink()
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    refused(call(*training(other, world), *here), f"model.path={other} {told}")
    assert (
        f"model.path={other} {told}" in call("stage=plan", *training(other, world)[1:], *here).err
    )
    assert left(tmp_path / "runs") == []  # not even the data run
    words = ["stage=eval", "eval=mgsm_0shot", f"checkpoint={other}", f"data_root={world}"]
    refused(call(*words, *here), f"checkpoint={other} {told}")


@pytest.mark.parametrize("way", ["lora", "full"])
def test_training_in_bfloat16_raises_no_alarm(
    way: str, call: Call, base: Path, world: Path, tmp_path: Path
) -> None:
    """The usual setting at 8B.

    What is saved after the first step is loaded again in the dtype it is trained in.
    """
    words = [f"sft={way}", "sft.weights=bfloat16", "sft.learning_rate=1e-3"]
    call(*training(base, world, *words), f"runs_dir={tmp_path}/runs", status=0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "merge=soup merge.weights=[0.2,0.3,0.5]",
            "merge.weights has 3 numbers for 2 merge.experts. Give one number",
        ),
        ("merge=soup merge.weights=[0.5,0.6]", "merge.weights=[0.5, 0.6] sum to 1.1. Give weights"),
        ("merge=ties merge.weights=[1,1,1]", "merge.weights has 3 numbers for 2 merge.experts"),
        (
            "merge=task_arithmetic merge.weights=[1]",
            "merge.weights has 1 numbers for 2 merge.experts",
        ),
        (
            "merge=layer_swap merge.bottom_layers=9 merge.top_layers=4 merge.top_transition=2",
            "but the model has 14. Lower",
        ),
        (
            "merge=layer_swap merge.bottom_layers=9 partition=A",
            "merge.bottom_layers=9 cannot be used with partition=A",
        ),
        ("merge=reset merge.layers=[0,14]", "merge.layers=[0, 14]: the model has layers 0 to 13"),
        (
            "merge=reset",
            "merge=reset has no part to reset. Give one of merge.side",
        ),
    ],
)
def test_a_merge_that_cannot_be_is_refused_before_a_run_is_begun(
    words: str, expected: str, call: Call, math_expert: Path, language_expert: Path, tmp_path: Path
) -> None:
    named = {
        "merge=layer_swap": [f"merge.math={math_expert}", f"merge.language={language_expert}"],
        "merge=reset": [f"merge.expert={math_expert}"],
    }
    experts = named.get(words.split()[0], [f"merge.experts=[{math_expert},{language_expert}]"])
    told = call(
        "stage=merge",
        *words.split(),
        *experts,
        f"runs_dir={tmp_path}/runs",
        "tracking.mode=disabled",
    )
    refused(told, expected)
    assert "[1/1]" not in told.err and not (tmp_path / "runs").exists()


def test_experts_of_different_bases(
    call: Call, math_expert: Path, language_expert: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(language_expert, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["parents"]["model"] |= {"hash": "f" * 64, "name": "elsewhere"}
    (other / "manifest.json").write_text(json.dumps(manifest))
    here = [f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]
    swap = [
        "stage=merge",
        "merge=layer_swap",
        f"merge.math={math_expert}",
        f"merge.language={other}",
    ]
    refused(call(*swap, *here), "merge.experts have different bases")
    soup = ["stage=merge", "merge=soup", f"merge.experts=[{math_expert},{other}]"]
    refused(call(*soup, *here), "from elsewhere). Name experts of one base, or give merge.base=RUN")
    assert left(tmp_path / "runs") == []
    base = manifest["config"]["model"]["path"]
    assert call(*soup, *here, f"merge.base={base}").status == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"file: a\nrows: [text\n", "own.yaml, line 2: invalid YAML (expected ',' or ']'"),
        (b"rows: text\nrows: pairs\n", "found duplicate key rows"),
        (b"rows:\n\tfile: a\n", "found character '\\t' that cannot start any token"),
        (b"rows: \xff\xfe\n", "is not UTF-8"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--cfg", "job"], ["-m"]])
def test_a_configuration_file_that_is_no_yaml(
    flags: list[str], text: bytes, expected: str, call: Call, tmp_path: Path, monkeypatch: Patch
) -> None:
    shutil.copytree(conf.folder(), tmp_path / "conf")
    (tmp_path / "conf/data/own.yaml").write_bytes(text)
    monkeypatch.setattr(conf, "folder", lambda: tmp_path / "conf")
    refused(call(*flags, "stage=data", "expert=own"), expected)


# --- the stage itself ---


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (
            KeyboardInterrupt(),
            130,
            "interrupted: finished runs and resume points stay, no other work was published",
        ),
        (MemoryError(), 1, "error: out of memory: lower sft.micro_batch_size"),
        (
            PermissionError(errno.EACCES, "Permission denied", "a/b"),
            1,
            "error: Permission denied: a/b; nothing was",
        ),
        (ZeroDivisionError("a fault"), 1, "error: ZeroDivisionError: a fault"),
    ],
)
def test_an_error_inside_a_stage(
    error: BaseException, status: int, expected: str, call: Call, tmp_path: Path, monkeypatch: Patch
) -> None:
    def stage(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
        (work / "train.jsonl").write_text("half")
        raise error

    monkeypatch.setattr(in_process, "stage_function", lambda run: stage)
    words = ["stage=data", "expert=math", "tracking.mode=disabled", f"runs_dir={tmp_path}/runs"]
    told = call(*words)
    assert told.status == status and told.out == "" and expected in told.err
    assert ("Traceback" in told.err) == isinstance(
        error, ZeroDivisionError
    )  # a fault of ours shows where
    assert left(tmp_path / "runs") == []
    monkeypatch.setattr(in_process, "stage_function", lambda run: lambda *_: {})
    assert call(*words).status == 0  # the same command goes on
