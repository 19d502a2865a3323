"""A folder that brings Python code along.

Refused by the name of auto_map at every place that loads, and never run.
"""

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_world.tokenizer import make_tokenizer as sandbox_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config.training import Model
from pipeline.errors import PipelineError
from pipeline.models.load import load_config, load_model, load_tokenizer
from pipeline.models.skeleton import build_skeleton

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).write_text("run")
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a Llama whose code.py writes the file `marker` when it is imported."""
    found, sizes = (
        tmp_path / "model",
        {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
    )
    config = AutoConfig.for_model(
        "llama", **sizes, num_attention_heads=2, vocab_size=len(sandbox_tokenizer())
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(found)
    sandbox_tokenizer().save_pretrained(found)
    (found / "own.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    return found


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def code_in_config(folder: Path) -> None:
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change(folder / "config.json", model_type="own", architectures=["OwnModel"], auto_map=names)


def code_in_tokenizer(folder: Path) -> None:
    names = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=names)


def code_in_tokenizer_as_of_old(folder: Path) -> None:
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map=["own.OwnTokenizer", None],
    )


def trained(folder: Path) -> Any:
    from pipeline.train.load import check_base, load_model, load_tokenizer

    config = SimpleNamespace(
        model=Model(name="x", path=str(folder)), sft=SimpleNamespace(weights="float32")
    )
    tokenizer = load_tokenizer(SimpleNamespace(config=config), [], folder)  # type: ignore[arg-type]
    check_base(folder, tokenizer)
    return load_model(SimpleNamespace(config=config), tokenizer, folder)  # type: ignore[arg-type]


def evaluated(folder: Path) -> Any:
    from pipeline.evaluate.model import open_model

    lm = open_model(folder)
    lm.load()
    return lm


def merged(folder: Path) -> Any:
    from pipeline.merge.live import merge_of_one, model_of

    return model_of(merge_of_one(folder), "auto", "cpu")


@pytest.mark.parametrize("load", [trained, evaluated, merged])
@pytest.mark.parametrize("code", [code_in_config, code_in_tokenizer, code_in_tokenizer_as_of_old])
def test_code_is_refused_and_nobody_is_asked(
    load: Callable[[Path], Any],
    code: Callable[[Path], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builtins, "input", lambda prompt="": "y")
    code(folder)
    file = "config.json" if code is code_in_config else "tokenizer_config.json"
    with pytest.raises(
        PipelineError, match=f"{file} names Python code in auto_map .*own.* which is never run"
    ):
        load(folder)
    assert not (folder.parent / "marker").exists()


@pytest.mark.parametrize("load", [trained, evaluated, merged])
def test_files_that_another_version_wrote_are_refused_by_their_name(
    load: Callable[[Path], Any], folder: Path
) -> None:
    if load is not trained:
        settings = (folder / "generation_config.json").read_text()
        (folder / "generation_config.json").write_text("{")
        with pytest.raises(
            PipelineError, match=r"generation_config.json of .* cannot be read \(.*Copy it again"
        ):
            load(folder)
        (folder / "generation_config.json").write_text(settings)
    change(folder / "tokenizer.json", model={"type": "of a later version"})
    with pytest.raises(
        PipelineError, match=r"The tokenizer of .*model cannot be read \(.*, or update transformers"
    ):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(PipelineError, match="model has no tokenizer. Put tokenizer.json"):
        load(folder)


def test_a_type_that_transformers_has_is_loaded_by_its_class(folder: Path) -> None:
    """As DeepSeek V3 and Phi-3 are published.

    config.json names code for older versions of transformers.
    """
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change(folder / "config.json", auto_map=names)
    assert type(load_config(folder)).__name__ == "LlamaConfig"
    assert (
        type(load_model(folder)).__name__
        == type(build_skeleton(folder, "x")).__name__
        == "LlamaForCausalLM"
    )
    assert load_tokenizer(folder)("Mia").input_ids == sandbox_tokenizer()("Mia").input_ids
    assert not (folder.parent / "marker").exists()


def test_from_pretrained_is_called_in_one_place() -> None:
    """Of tokenizers, configurations and models: elsewhere trust_remote_code could be forgotten."""
    import pipeline

    source = Path(pipeline.__file__).parent
    callers = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        for line in path.read_text().splitlines()
        if "from_pretrained(" in line and "Auto" in line and "'" not in line and '"' not in line
    }
    assert callers == {"models/load.py"}
