"""Models in forms that other tools write: their tokenizer's state, config.json and dtypes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from as_torch import as_torch
from safetensors.torch import load_file, save_file
from small_decoders import network

from pipeline.__main__ import main
from pipeline.errors import PipelineError
from pipeline.merge.adapters import Adapted, open_source
from pipeline.merge.methods.soup import Soup
from pipeline.merge.open_merge import open_merge
from pipeline.merge.write_adapter import with_uniform_rank, write_adapter
from pipeline.models.alike import arithmetic_settings


def test_a_key_that_is_absent_has_the_default_of_its_class() -> None:
    default, wide = ({"model_type": "llama", **more} for more in ({}, {"rope_theta": 1000000.0}))
    assert arithmetic_settings(default)["rope_parameters.rope_theta"] == 10000.0
    assert arithmetic_settings(wide)["rope_parameters.rope_theta"] == 1000000.0


def test_rotary_embeddings_by_layer_type_are_those_of_transformers_4() -> None:
    from transformers import AutoConfig

    scaled = {"factor": 8.0, "rope_type": "linear"}
    hub = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 64,
        "rope_scaling": scaled,
    }
    saved = AutoConfig.for_model(**json.loads(json.dumps(hub))).to_dict()
    assert arithmetic_settings(hub) == arithmetic_settings(json.loads(json.dumps(saved)))


HUB_CONFIGS = json.loads(
    (Path(__file__).parent / "hub_configs.json").read_text()
)  # config.json of models there


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_a_config_of_the_hub_is_the_one_that_transformers_saves_of_it(
    name: str, tmp_path: Path
) -> None:
    """Of a base and the experts trained from it; with another rotary base, they are not one."""
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(HUB_CONFIGS[name]))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    before, after = arithmetic_settings(HUB_CONFIGS[name]), arithmetic_settings(saved)
    assert {key: after[key] for key in before.keys() & after.keys()} == {
        key: before[key] for key in before.keys() & after.keys()
    }
    assert len(before.keys() & after.keys()) > 6
    wider = {
        **HUB_CONFIGS[name],
        **{key: 12345.0 for key in ("rope_theta", "rotary_emb_base") if key in HUB_CONFIGS[name]},
    }
    assert wider == HUB_CONFIGS[name] or arithmetic_settings(wider) != before


def cast(source: Path, folder: Path, dtype: torch.dtype) -> Path:
    shutil.copytree(source, folder)
    tensors = {
        name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_another_rope_is_named_with_both_values(
    models: dict[str, list[Path]], tmp_path: Path
) -> None:
    _, math, language = models["llama"]
    for name, source, theta in (("a", math, None), ("b", language, 1000000.0)):
        shutil.copytree(source, tmp_path / name)
        config = json.loads((source / "config.json").read_text())
        config = {key: value for key, value in config.items() if not key.startswith("rope")}
        (tmp_path / name / "config.json").write_text(
            json.dumps(config | ({"rope_theta": theta} if theta else {}))
        )
    sources = {"0": open_source(tmp_path / "a"), "1": open_source(tmp_path / "b")}
    with pytest.raises(
        PipelineError, match=r"rope_theta 1000000.0, .* has rope_parameters.rope_theta 10000.0"
    ):
        open_merge(Soup(experts=["a", "b"]), sources)


def test_an_adapter_of_a_model_with_a_tower_is_as_peft_merges_it(tmp_path: Path) -> None:
    """PEFT names the modules in memory, model.language_model.layers.

    The file has language_model.model.layers.
    """
    from peft import LoraConfig, get_peft_model
    from small_decoders import config_of
    from transformers import Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config_of("gemma3")).save_pretrained(tmp_path / "base")
    model = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "base")
    targets = r".*language_model.*\.(q_proj|v_proj)$"
    lora = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    lora.save_pretrained(tmp_path / "adapter")
    lora.merge_and_unload().save_pretrained(tmp_path / "merged")
    merge = open_merge(Soup(experts=["a"], form="dense"), {"0": open_source(tmp_path / "adapter")})
    (tmp_path / "out").mkdir()
    merge.write(tmp_path / "out")
    ours, peft = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "merged"))
    assert ours.keys() == peft.keys()
    assert max(float((ours[name] - peft[name]).abs().max()) for name in peft) <= 1e-6


def merged_by_peft(lora: Any, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return the folder of an adapter by PEFT, and the tensors of the merged model."""
    lora.save_pretrained(folder / "adapter")
    lora.merge_and_unload().save_pretrained(folder / "merged")
    return folder / "adapter", load_file(folder / "merged" / "model.safetensors")


def test_embeddings_stored_beside_lora_of_a_tied_base_whose_vocabulary_grew(tmp_path: Path) -> None:
    """PEFT stores embeddings and an equal head by itself (peft 2898)."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    tied = network("llama", 0)
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tied.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(tied.config.vocab_size + 2)
    lora = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    )
    folder, peft = merged_by_peft(lora, tmp_path)
    assert (
        sum(
            "embed" in name or "head" in name
            for name in load_file(folder / "adapter_model.safetensors")
        )
        == 2
    )
    source = open_source(folder, tmp_path / "base")
    assert (
        source.config["vocab_size"] == tied.config.vocab_size + 2
        and source.infos.keys() == peft.keys()
    )
    for name, tensor in peft.items():
        assert torch.allclose(as_torch(source, name), tensor, atol=1e-6), name


@pytest.mark.parametrize("target", [["c_attn", "c_proj", "c_fc"], ["c_attn", "lm_head"]])
def test_an_adapter_of_gpt2_is_as_peft_merges_it(target: list[str], tmp_path: Path) -> None:
    """Conv1D stores (inputs, outputs). Written again as an adapter, PEFT reads what we mean."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    network("gpt2", 0).save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    if "lm_head" in target:
        untied = AutoModelForCausalLM.from_pretrained(tmp_path / "base", tie_word_embeddings=False)
        torch.nn.init.normal_(untied.lm_head.weight)
        untied.save_pretrained(tmp_path / "base")
    assert config["model_type"] == "gpt2"

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    settings = LoraConfig(r=3, lora_alpha=5, target_modules=target, init_lora_weights=False)
    folder, peft = merged_by_peft(get_peft_model(base(), settings), tmp_path)
    source = open_source(folder, tmp_path / "base")
    assert isinstance(source, Adapted)
    for name, tensor in peft.items():
        assert torch.allclose(as_torch(source, name), tensor, atol=1e-6), name
    for place, adapter in enumerate((source, with_uniform_rank(source))):
        again = tmp_path / f"again-{place}"
        again.mkdir()
        write_adapter(adapter, again)
        for name, tensor in (
            PeftModel.from_pretrained(base(), again).merge_and_unload().state_dict().items()
        ):
            assert torch.allclose(peft.get(name, tensor), tensor, atol=1e-6), name


@pytest.mark.parametrize(
    ("change", "expected"), [("zeros", r"\[0\]"), ("halves", r"\[16, "), ("flat", r"\[\d+\]")]
)
def test_factors_of_another_shape_are_refused(change: str, expected: str, tmp_path: Path) -> None:
    """DeepSpeed and FSDP leave such factors if weights are saved without gathering.

    See peft issues 2071 and 2699.
    """
    from peft import LoraConfig, get_peft_model

    model = network("llama", 0)
    model.save_pretrained(tmp_path / "base")
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    changes = {
        "zeros": lambda t: t[:0, 0],
        "halves": lambda t: t[: len(t) // 2],
        "flat": torch.flatten,
    }
    save_file(
        {name: changes[change](t).contiguous() for name, t in load_file(file).items()},
        file,
        {"format": "pt"},
    )
    with pytest.raises(
        PipelineError,
        match=rf"factors of \S*q_proj.weight have shapes {expected}.* on another base",
    ):
        open_source(tmp_path / "adapter", tmp_path / "base")


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(None, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16")],
)
def test_the_plan_says_in_which_dtype_a_merge_is_stored(
    given: torch.dtype | None, dtype: str, models: dict[str, list[Path]], tmp_path: Path, capfd: Any
) -> None:
    """The dtype that eval.dtype=auto takes, and that of the written files.

    The mean is computed in float32.
    """
    base, *experts = models["llama"]
    half = cast(experts[0], tmp_path / "half", torch.float16)
    brain = cast(experts[1], tmp_path / "brain", torch.bfloat16)
    words = [
        "merge=soup",
        f"merge.experts=[{half},{brain}]",
        f"runs_dir={tmp_path}/runs",
        "tracking.mode=disabled",
    ]
    words += [f"merge.base={cast(base, tmp_path / 'base', given)}"] if given else []
    assert main(["stage=merge", *words]) == 0
    told = capfd.readouterr()
    assert f"stored in {dtype}" in told.err
    folder = Path(told.out.strip())
    first, second = (load_file(source / "model.safetensors") for source in (half, brain))
    for name, merged in load_file(folder / "model.safetensors").items():
        mean = (first[name].float() + second[name].float()) / 2
        assert str(merged.dtype) == f"torch.{dtype}" and torch.equal(merged, mean.to(merged.dtype))
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
