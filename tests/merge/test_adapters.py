"""LoRA experts against PEFT itself, and adapters out against the dense merge."""

import json
import math
import shutil
from contextlib import nullcontext

import pytest
import torch
from as_torch import as_torch
from safetensors.torch import load_file, save_file
from small_models import lora_expert, stacked

from pipeline.commands.plan import show_plan
from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.merge.adapters import open_source
from pipeline.merge.live import merge_of_one, model_of
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.reset import Reset
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.methods.ties import Ties
from pipeline.merge.open_merge import open_merge


@pytest.fixture(scope="module")
def lora(models, tmp_path_factory):
    """role -> folder of an adapter on the random Llama: rank 3, and rank 5 with rsLoRA."""
    base, folders = models["llama"][0], {}
    settings = {
        "math": dict(
            r=3, lora_alpha=7, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]
        ),
        "language": dict(
            r=5, lora_alpha=4, use_rslora=True, target_modules=["q_proj", "k_proj", "up_proj"]
        ),
    }
    for seed, (role, more) in enumerate(settings.items()):
        folders[role] = tmp_path_factory.mktemp("lora") / role
        merged = lora_expert(base, folders[role], seed, **more)
        save_file(merged, folders[role].parent / f"{role}.safetensors")
        for file in base.glob("tokenizer*"):
            shutil.copy(file, folders[role])
    return folders


def dense_of(folder):
    return load_file(folder.parent / f"{folder.name}.safetensors")


LINEAR = {
    "swap": LayerSwap(math="a", language="b", bottom_layers=3, bottom_transition=2, top_layers=1),
    "soup": Soup(experts=["a", "b"], weights=[0.3, 0.7]),
    "task_arithmetic": TaskArithmetic(experts=["a", "b"], scale=0.6, weights=[1.0, 0.5]),
    "reset": Reset(expert="a", layers=[0, 1]),
}


def opened(config, lora, form="auto"):
    config.form = form
    roles = (
        ["math", "language"]
        if config.method == "layer_swap"
        else ["expert"]
        if config.method == "reset"
        else ["0", "1"]
    )
    experts = [open_source(lora[role]) for role in ("math", "language")]
    return open_merge(config, dict(zip(roles, experts, strict=False)))


@pytest.mark.parametrize("method", LINEAR)
def test_adapters_out_are_the_dense_merge_and_load_in_peft(lora, models, tmp_path, method):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    dense, merge = opened(LINEAR[method], lora, "dense"), opened(LINEAR[method], lora)
    assert merge.adapter is not None and dense.adapter is None
    digests = merge.write(tmp_path)
    assert set(digests) == set(load_file(tmp_path / "adapter_model.safetensors"))
    assert not (tmp_path / "model.safetensors").exists() and (tmp_path / "tokenizer.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(models["llama"][0], dtype=torch.float32)
    loaded = PeftModel.from_pretrained(model, tmp_path).merge_and_unload().state_dict()
    again = open_source(tmp_path)
    for name in dense.names:
        torch.testing.assert_close(loaded[name], as_torch(dense, name), rtol=0, atol=1e-6)
        assert torch.equal(as_torch(again, name), as_torch(merge, name)), (
            name
        )  # disk is what live would be


def test_choosing_layers_keeps_factors_as_they_are(lora, tmp_path):
    opened(LayerSwap(math="a", language="b", bottom_layers=3, top_layers=1), lora).write(tmp_path)
    found = load_file(tmp_path / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    for layer, role, scale in ((0, "language", 4 / math.sqrt(5)), (5, "math", 7 / 3)):
        theirs = load_file(lora[role] / "adapter_model.safetensors")
        module = f"model.layers.{layer}.self_attn.q_proj"
        for part in ("lora_A", "lora_B"):
            name = f"base_model.model.{module}.{part}.weight"
            assert torch.equal(found[name], theirs[name])
        rank = settings["rank_pattern"][module]
        assert settings["alpha_pattern"][module] / rank == pytest.approx(scale)
    assert not any(
        "layers.0.self_attn.v_proj" in name for name in found
    )  # the language expert did not train it


def test_an_adapter_is_scored_with_its_base(lora):
    live, expected = model_of(merge_of_one(lora["math"]), "auto", "cpu"), dense_of(lora["math"])
    for name, parameter in live.model.named_parameters():
        torch.testing.assert_close(parameter.data, expected[name], rtol=0, atol=1e-6)


def test_adapters_that_are_refused(lora, models, tmp_path):
    def changed(**settings):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(lora["math"], folder)
        config = json.loads((folder / "adapter_config.json").read_text()) | settings
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    for settings, words in (
        ({"use_dora": True}, "an adapter with use_dora"),
        ({"peft_type": "IA3"}, "an adapter with peft_type=IA3"),
        (
            {"base_model_name_or_path": str(tmp_path / "gone")},
            "whose base .*gone is not here. .* merge.base=RUN",
        ),
        (
            {"base_model_name_or_path": str(stacked(tmp_path / "narrow", 14, 0))},
            "trained on another base",
        ),
        (
            {"alpha_pattern": {"(([a-z_.0-9]+)+)+!": 3}},
            "a pattern of alpha_pattern takes too long to match. Name",
        ),
        (
            {"alpha_pattern": {"[": 3}},
            r"a pattern of alpha_pattern is not a regular expression \(unterminated",
        ),
        (
            {"lora_alpha": "4"},
            r"adapter_config.json: lora_alpha has the value '4' \(Input should be a valid number\)",
        ),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path has the value 5"),
        ({"base_model_name_or_path": "a\0b"}, "base_model_name_or_path has the value 'a.x00b'"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern has the value"),
    ):
        with pytest.raises(PipelineError, match=words):
            open_source(changed(**settings))
    half = changed()
    tensors = load_file(half / "adapter_model.safetensors")
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    save_file(tensors, half / "adapter_model.safetensors")
    with pytest.raises(PipelineError, match="only one factor of .*, not A and B"):
        open_source(half)
    with pytest.raises(PipelineError, match="merge.form=adapter is not possible"):
        config = Ties(experts=["a", "b"], form="adapter")
        open_merge(config, {"0": open_source(lora["math"]), "1": open_source(lora["language"])})


# --- from elsewhere ---


@pytest.fixture
def elsewhere(lora, models, tmp_path):
    """Write base/, math/ and language/ as PEFT saves them, without manifests."""

    def put(name="../base"):
        folder = tmp_path / "elsewhere"
        shutil.copytree(models["llama"][0], folder / "base")
        for role in ("math", "language"):
            shutil.copytree(lora[role], folder / role)
            config = json.loads((folder / role / "adapter_config.json").read_text())
            config["base_model_name_or_path"] = name.format(folder)
            (folder / role / "adapter_config.json").write_text(json.dumps(config))
        return folder

    return put


def words(folder, *more):
    return ["stage=merge", "merge=soup", f"merge.experts=[{folder}/math,{folder}/language]", *more]


@pytest.mark.parametrize("name", ["../base", "{}/base"])
def test_adapters_of_no_run_merge_on_the_base_that_they_name(lora, elsewhere, make_run, name):
    folder = elsewhere(name)
    merged, m, n = make_run(*words(folder)), dense_of(lora["math"]), dense_of(lora["language"])
    source = open_source(merged)  # an adapter too, which finds its base from where it is
    for tensor in source.names:
        torch.testing.assert_close(
            as_torch(source, tensor), (m[tensor] + n[tensor]) / 2, rtol=0, atol=1e-6
        )
    named = json.loads((merged / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str((folder / "base").resolve())
    recorded = json.loads((merged / "manifest.json").read_text())["parents"]
    assert recorded["base"]["name"] == "base" and set(recorded) == {"0", "1", "base"}
    again = make_run(
        "stage=merge", "merge=reset", f"merge.expert={merged}", "merge.layers=[0]"
    )  # finds it in turn
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(as_torch(open_source(again), name), as_torch(source.base, name).float())


def test_adapters_of_two_bases_are_refused(elsewhere, models, make_run):
    folder = elsewhere()
    shutil.copytree(models["llama"][1], folder / "other")
    config = json.loads((folder / "language/adapter_config.json").read_text())
    config["base_model_name_or_path"] = "../other"
    (folder / "language/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(
        PipelineError,
        match=r"different bases \(math from base, language from other\).*merge.base=RUN",
    ):
        make_run(*words(folder))


def test_an_adapter_of_another_base_is_found_by_the_plan(lora, elsewhere, tmp_path, runs_dir):
    """Of a narrower model, by its headers; of a run, whose manifest has its base."""
    folder, narrow = elsewhere(), stacked(tmp_path / "narrow", 14, 0)
    run = tmp_path / "run"
    shutil.copytree(lora["math"], run)
    ancestor = {"name": "base", "hash": "1" * 64, "content": None}
    manifest = {
        "name": "run",
        "hash": "2" * 64,
        "decided_by": {"stage": "sft"},
        "cost": {"seconds": 1},
        "config": {"model": {"path": str(folder / "base")}},
        "parents": {"model": ancestor},
        "facts": {"weights": {"root": "sha256:3", "digests": {}}},
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    scored = ["stage=eval", "eval=mgsm_0shot", f"checkpoint={folder}/math", f"eval.base={narrow}"]
    of_run = ["stage=merge", "merge=soup", f"merge.experts=[{run},{folder}/language]"]
    for stage, problem in (
        (words(folder, f"merge.base={narrow}"), "trained on another base"),
        (scored, "trained on another base"),
        (
            [*of_run, f"merge.base={narrow}"],
            f"{run} is an adapter of {folder}/base, but merge.base is {narrow}",
        ),
        ([*of_run, f"merge.base={folder}/base"], ""),
        (words(folder), ""),
    ):
        with pytest.raises(PipelineError, match=problem) if problem else nullcontext():
            show_plan(
                compose(
                    [
                        f"runs_dir={runs_dir}",
                        "stage=plan",
                        *[w.replace("stage=", "plan.stage=") for w in stage],
                    ]
                )
            )
