"""stage=export export.adapter=true.

Merges of LoRA experts as adapters that PEFT loads, and vLLM scales as intended.

Expected tensors are computed in float64 from the experts that PEFT merged itself.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from fixture_types import Call, Make
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from small_models import LAYERS, lora_expert

Tensors = dict[str, torch.Tensor]
EXPERTS: dict[str, dict[str, Any]] = {
    "all": dict(r=3, lora_alpha=7, target_modules="all-linear"),
    "some": dict(r=5, lora_alpha=4, use_rslora=True, target_modules=["q_proj", "v_proj"]),
    "few": dict(
        r=2,
        lora_alpha=3,
        target_modules=["q_proj"],
        layers_to_transform=[1, 2, 12],
        rank_pattern={"layers.1.self_attn.q_proj": 4},
        alpha_pattern={"layers.2.self_attn.q_proj": 9},
    ),
}


@pytest.fixture(scope="module")
def folder(models: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write base/ and each expert as PEFT saves it, and the dense experts by PEFT."""
    place = tmp_path_factory.mktemp("experts")
    shutil.copytree(models["llama"][0], place / "base")
    for seed, (name, settings) in enumerate(EXPERTS.items()):
        save_file(
            lora_expert(place / "base", place / name, seed, **settings),
            place / f"{name}.safetensors",
        )
    return place


@pytest.fixture
def export(call: Call, tmp_path: Path) -> Call:
    def command(checkpoint: Any, *more: str, to: str = "out") -> SimpleNamespace:
        words = [
            f"checkpoint={checkpoint}",
            f"export.to={tmp_path}/{to}",
            f"runs_dir={tmp_path}/runs",
        ]
        return call("stage=export", *words, "export.adapter=true", *more)

    return command


def dense(folder: Path, name: str) -> Tensors:
    tensors = load_file(
        folder / (f"{name}.safetensors" if name != "base" else "base/model.safetensors")
    )
    return {key: tensor.double() for key, tensor in tensors.items()}


def as_vllm_reads_it(base: Tensors, adapter: Path) -> Tensors:
    """Read r, lora_alpha and use_rslora of adapter_config.json, as vLLM does, at one rank.

    See vllm/lora/peft_helper.py.
    """
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors, found = load_file(adapter / "adapter_model.safetensors"), dict(base)
    assert (
        not settings["use_rslora"]
        and settings["bias"] == "none"
        and not settings.get("modules_to_save")
    )
    targets = {name.split(".")[-3] for name in tensors}
    assert sorted(targets) == settings["target_modules"]
    expected_modules = {name for name in base if name.split(".")[-2] in targets}
    assert {
        name.removeprefix("base_model.model.").replace(".lora_A", "").replace(".lora_B", "")
        for name in tensors
    } == (expected_modules)
    for name in expected_modules:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (tensors[f"{module}.lora_{part}.weight"] for part in "AB")
        assert a.dtype == b.dtype == torch.float32 and len(a) == b.shape[1] == settings["r"]
        found[name] = base[name] + settings["lora_alpha"] / settings["r"] * (
            b.double() @ a.double()
        )
    return found


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])).logits


def peft_logits(folder: Path, adapter: Path) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of tensors that are missing
        return logits(PeftModel.from_pretrained(base, adapter))


def swapped(base: Tensors, experts: dict[str, Tensors], name: str) -> torch.Tensor:
    """Take layers 0 to 2 and the last from `some`, and the other layers from `all`.

    Layer 3 and the parameters outside of layers come from both.
    """
    layer = int(name.split(".")[2]) if ".layers." in name else None
    if layer in (3, None):
        return (experts["all"][name] + experts["some"][name]) / 2
    return experts["some" if layer in (0, 1, 2, LAYERS - 1) else "all"][name]


def weighted(*weights: float) -> Callable[..., torch.Tensor]:
    def expected(base: Tensors, experts: dict[str, Tensors], name: str) -> torch.Tensor:
        changes = [
            weight * (experts[key][name] - base[name])
            for key, weight in zip(EXPERTS, weights, strict=False)
        ]
        return base[name] + torch.stack(changes).sum(0)

    return expected


# words -> what the tensors should be, and the rank: concatenated where both experts are in a tensor
MERGES: dict[str, tuple[str, Callable[..., torch.Tensor], int]] = {
    "swap": (
        (
            "merge=layer_swap merge.math=F/all merge.language=F/some merge.bottom_layers=3"
            " merge.bottom_transition=1 merge.top_layers=1"
        ),
        swapped,
        8,
    ),
    "soup": (
        "merge=soup merge.experts=[F/all,F/some] merge.weights=[0.3,0.7]",
        weighted(0.3, 0.7),
        8,
    ),
    "negative": (
        (
            "merge=task_arithmetic merge.experts=[F/all,F/some] merge.weights=[1.0,-0.5]"
            " merge.scale=0.8"
        ),
        weighted(0.8, -0.4),
        8,
    ),
    "three": ("merge=task_arithmetic merge.experts=[F/all,F/some,F/few]", weighted(1, 1, 1), 12),
    "reset": (
        "merge=reset merge.expert=F/all merge.layers=[0,1]",
        lambda base, experts, name: (
            base if ".layers.0." in name or ".layers.1." in name else experts["all"]
        )[name],
        3,
    ),
    "control": ("merge=soup merge.experts=[F/all,F/some] merge.control=[1]", weighted(0.5), 3),
}


@pytest.mark.parametrize("merge", MERGES)
def test_a_merge_of_lora_experts_is_exported_exactly(
    merge: str, folder: Path, make_run: Make, export: Call, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    words, expected, rank = MERGES[merge]
    asked = ["stage=merge", *words.replace("F/", f"{folder}/").split(), f"runs_dir={tmp_path}/runs"]
    whole, adapter = make_run(*asked, "merge.form=dense"), make_run(*asked)
    assert (whole / "model.safetensors").is_file() and (
        adapter / "adapter_model.safetensors"
    ).is_file()
    told, out = export(adapter.name), tmp_path / "out"
    assert (told.status, told.out) == (0, f"{out}\n"), told.err
    base, written = (
        dense(folder, "base"),
        dense(folder, "base") | load_file(whole / "model.safetensors"),
    )
    experts = {name: dense(folder, name) for name in EXPERTS}
    for name, tensor in as_vllm_reads_it(base, out).items():
        torch.testing.assert_close(tensor, expected(base, experts, name), rtol=0, atol=1e-6)
        torch.testing.assert_close(tensor, written[name].double(), rtol=0, atol=1e-6)
    assert json.loads((out / "adapter_config.json").read_text())["r"] == rank
    merged = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    torch.testing.assert_close(peft_logits(folder, out), logits(merged), rtol=0, atol=1e-5)

    names = {path.name for path in out.iterdir()}
    assert {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    } <= names
    assert not names & {"config.json", "model.safetensors", "manifest.json"}
    assert str(tmp_path) not in "".join(
        path.read_text() for path in out.iterdir() if path.suffix != ".safetensors"
    )
    assert str(folder) not in (out / "adapter_config.json").read_text()  # PEFT is given the base


def test_a_single_adapter_is_exported_with_its_base_on_the_hub(
    folder: Path, export: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder / "base"))
    expert = tmp_path / "few"
    shutil.copytree(folder / "few", expert)
    change_settings(expert, base_model_name_or_path="org/base", revision="abc")
    told = export(expert)
    assert told.status == 0, told.err
    settings = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("org/base", "abc")
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.base_model in ("org/base", ["org/base"]) and card.data.library_name == "peft"
    assert card.data.to_dict()["base_model_relation"] == "adapter"
    expected = dense(folder, "few")
    for name, tensor in as_vllm_reads_it(dense(folder, "base"), tmp_path / "out").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


# --- refusals ---


def change_settings(expert: Path, **settings: Any) -> None:
    file = expert / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def with_whole_head(folder: Path, place: Path) -> Path:
    """Write the expert `all` with modules_to_save=["lm_head"], as PEFT stores it."""
    shutil.copytree(folder / "all", place)
    change_settings(
        place, modules_to_save=["lm_head"], base_model_name_or_path=str(folder / "base")
    )
    head = load_file(folder / "base/model.safetensors")["lm_head.weight"].float()
    tensors = load_file(place / "adapter_model.safetensors") | {
        "base_model.model.lm_head.weight": head + 1
    }
    save_file(tensors, place / "adapter_model.safetensors")
    return place


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("merge=ties merge.experts=[F/all,F/some]", "is a whole model, not an adapter"),
        (
            "merge=soup merge.experts=[F/all,F/some] merge.form=dense",
            "is a whole model, not an adapter",
        ),
        ("HEAD", "head holds whole tensors, from modules_to_save, bias or a"),
    ],
)
def test_what_is_no_adapter_is_refused(
    words: str,
    why: str,
    folder: Path,
    make_run: Make,
    export: Call,
    tmp_path: Path,
) -> None:
    if words == "HEAD":
        model: Any = with_whole_head(folder, tmp_path / "head")
    else:
        model = make_run(
            "stage=merge", *words.replace("F/", f"{folder}/").split(), f"runs_dir={tmp_path}/runs"
        ).name
    told = export(model)
    assert told.status == 1 and not told.out and not (tmp_path / "out").exists()
    assert (
        f"export.adapter=true: {Path(model).name} is not exactly an adapter of its base: "
        in told.err
    )
    assert why in told.err and len(told.err.splitlines()) == 1
    assert (
        "Remove export.adapter to write the whole model, or merge LoRA experts with"
        " merge.form=adapter" in told.err
    )
