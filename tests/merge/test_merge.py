"""Merges of checkpoints.

Hand-made numbers, tiny models of each architecture, and the written folder.
"""

import json
import os
import shutil
import stat
from types import SimpleNamespace

import pytest
import torch
from as_torch import as_torch
from safetensors.torch import load_file, save_file
from small_models import TWO_LAYERS, by_hand, swap

from pipeline.config.stages import MergeStage
from pipeline.errors import PipelineError
from pipeline.merge.formulas import mean_change
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.ties import Ties
from pipeline.merge.open_merge import open_merge
from pipeline.merge.stage import make
from pipeline.merge.summary import group_weights, plan_text
from pipeline.models.checkpoint import Checkpoint, digest_tensors, read_header, weights_root
from pipeline.runs.manifest import Manifest


def test_a_two_layer_swap_by_hand(tmp_path):
    math, language = by_hand(tmp_path / "m", 2.0), by_hand(tmp_path / "l", 5.0)
    config = swap(
        bottom_layers=1, top_layers=0, embeddings="average", final_norm="math", head="language"
    )
    merge = open_merge(config, {"math": math, "language": language})
    values = {name: as_torch(merge, name).tolist() for name in merge.names}
    assert values == {
        **{name: [5.0, 5.0] if ".layers.0." in name else [2.0, 2.0] for name in TWO_LAYERS},
        "model.embed_tokens.weight": [3.5, 3.5],
        "lm_head.weight": [5.0, 5.0],
    }
    assert group_weights(merge) == [
        {"where": "embedding", "what": "all", "weights": {"math": 0.5, "language": 0.5}},
        {"where": "layer 0", "what": "all", "weights": {"language": 1.0}},
        {"where": "layer 1", "what": "all", "weights": {"math": 1.0}},
        {"where": "final_norm", "what": "all", "weights": {"math": 1.0}},
        {"where": "head", "what": "all", "weights": {"language": 1.0}},
    ]


def test_a_weighted_soup_by_hand(tmp_path):
    experts = {"0": by_hand(tmp_path / "a", 2.0), "1": by_hand(tmp_path / "b", 10.0)}
    merge = open_merge(Soup(experts=["a", "b"], weights=[0.25, 0.75]), experts)
    assert all(as_torch(merge, name).tolist() == [8.0, 8.0] for name in TWO_LAYERS)
    assert [row["where"] for row in group_weights(merge)] == [
        "embedding",
        "layers 0-1",
        "final_norm",
        "head",
    ]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "cohere"])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_written_merge_loads_in_transformers(models, tmp_path, kind, dtype):
    from transformers import AutoModelForCausalLM

    math, language = (Checkpoint.open(folder) for folder in models[kind][1:])
    config = swap(bottom_layers=3, bottom_transition=2, top_layers=1, dtype=dtype)
    digests = open_merge(config, {"math": math, "language": language}).write(tmp_path)

    network, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = dict(network.named_parameters())
    assert set(loaded) == set(math.names) == set(digests)
    assert ("lm_head.weight" in loaded) == (kind != "cohere")
    for name, parameter in loaded.items():
        m, n = as_torch(math, name).float(), as_torch(language, name).float()
        layer = int(name.split(".")[2]) if ".layers." in name else None
        expected = n if layer in (0, 1, 2, 13) else m
        if layer is None or layer in (3, 4):
            expected = (m + n) / 2
        expected = expected if dtype else expected.bfloat16()
        assert parameter.dtype == expected.dtype
        assert torch.equal(parameter, expected), name
    assert digest_tensors(tmp_path) == digests


def test_files_come_from_the_math_expert_unless_another_is_named(models, tmp_path, request):
    math, language = (Checkpoint.open(folder) for folder in models["llama"][1:])
    before = os.umask(0o077)
    request.addfinalizer(lambda: os.umask(before))
    for source, name in ((None, "math"), ("language", "language")):
        folder = tmp_path / name
        folder.mkdir()
        open_merge(
            swap(bottom_layers=1, files_from=source), {"language": language, "math": math}
        ).write(folder)
        assert (folder / "chat_template.jinja").read_text() == name
        for file in ("config.json", "generation_config.json", "tokenizer.json"):
            original = {"math": math, "language": language}[name].folder / file
            assert (folder / file).read_bytes() == original.read_bytes()
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}


def test_sharded_sources_keep_their_layout(models, tmp_path):
    from transformers import AutoModelForCausalLM

    math, language = models["llama"][1:]
    AutoModelForCausalLM.from_pretrained(math).save_pretrained(
        tmp_path / "sharded", max_shard_size="20KB"
    )
    config, single, sharded = swap(bottom_layers=3), tmp_path / "single", tmp_path / "merged"
    single.mkdir()
    sharded.mkdir()
    sources = {"math": Checkpoint.open(math), "language": Checkpoint.open(language)}
    expected = open_merge(config, sources).write(single)
    sources["math"] = Checkpoint.open(tmp_path / "sharded")
    assert open_merge(config, sources).write(sharded) == expected
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(shards) > 1
    assert shards == sorted(path.name for path in (tmp_path / "sharded").glob("*.safetensors"))
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    original = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())
    assert index["weight_map"] == original["weight_map"]
    assert index["metadata"]["total_size"] == original["metadata"]["total_size"]
    loaded = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    reference = load_file(single / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in reference.items())


def stored_as(source, folder, dtype_of):
    """Copy a checkpoint with dtypes by a function of the names, and return its tensors."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors").items()
    tensors = {name: tensor.float().to(dtype_of(name)) for name, tensor in tensors}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def norms_in_float32(name):
    return torch.float32 if "norm" in name else torch.bfloat16


@pytest.mark.parametrize("mixed_first", [True, False])
def test_a_tensor_in_several_dtypes_is_rounded_in_no_order(models, tmp_path, mixed_first):
    """One expert's norms are float32 and its matrices bfloat16; the other is all float32."""
    _, math, language = models["llama"]
    mixed = stored_as(math, tmp_path / "mixed", norms_in_float32)
    whole = stored_as(language, tmp_path / "whole", lambda name: torch.float32)
    names = ["mixed", "whole"] if mixed_first else ["whole", "mixed"]
    sources = {str(role): Checkpoint.open(tmp_path / name) for role, name in enumerate(names)}
    merge = open_merge(Soup(experts=names), sources)
    (tmp_path / "merged").mkdir()
    merge.write(tmp_path / "merged")
    for name, tensor in load_file(tmp_path / "merged/model.safetensors").items():
        assert tensor.dtype == torch.float32 and torch.equal(
            tensor, (mixed[name].float() + whole[name]) / 2
        )
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == "float32"


def test_dtypes_that_differ_between_tensors_alone_are_kept(models, tmp_path):
    for folder in models["llama"][1:]:
        stored_as(folder, tmp_path / folder.name, norms_in_float32)
    sources = {
        str(role): Checkpoint.open(tmp_path / one.name)
        for role, one in enumerate(models["llama"][1:])
    }
    merge = open_merge(Soup(experts=["a", "b"]), sources)
    (tmp_path / "merged").mkdir()
    merge.write(tmp_path / "merged")
    for name, tensor in load_file(tmp_path / "merged/model.safetensors").items():
        assert tensor.dtype == norms_in_float32(name)


@pytest.mark.parametrize("with_head", ["math", "language"])
def test_a_head_of_later_tokens_is_named_and_not_declared(models, tmp_path, with_head):
    """mtp.* of one expert, as Qwen 3.5 has it: transformers passes over it, and so do merges."""
    folders = {"math": models["llama"][1], "language": models["llama"][2]}
    for role, folder in folders.items():
        copied = shutil.copytree(folder, tmp_path / role)
        config = json.loads((copied / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
        (copied / "config.json").write_text(json.dumps(config))
    tensors = load_file(folders[with_head] / "model.safetensors") | {
        "mtp.fc.weight": torch.ones(2, 2)
    }
    save_file(tensors, tmp_path / with_head / "model.safetensors", {"format": "pt"})
    sources = {role: Checkpoint.open(tmp_path / role) for role in folders}
    merge = open_merge(swap(bottom_layers=3), sources)
    (note,) = merge.notes
    assert note == f"left out: mtp.*, a head of later tokens that {with_head} stores"
    assert note in plan_text(merge, {}, [], "")
    (tmp_path / "merged").mkdir()
    merge.write(tmp_path / "merged")
    assert not any("mtp" in name for name in load_file(tmp_path / "merged/model.safetensors"))
    assert json.loads((tmp_path / "merged/config.json").read_text())["mtp_num_hidden_layers"] == 0


def test_a_folder_that_was_trained_further_is_measured_again(models, tmp_path):
    """In one process, such as a notebook's.

    Its change, and what decides the tensors of a merge in memory.
    """
    base, math, _ = models["llama"]
    expert = shutil.copytree(math, tmp_path / "expert")

    def measured():
        source = Checkpoint.open(expert)
        merge = open_merge(Soup(experts=["a"]), {"0": source})
        return mean_change([(1.0, source)], Checkpoint.open(base), 1), merge.signature(
            "model.norm.weight"
        )

    before = measured()
    assert measured() == before
    origin, tensors = load_file(base / "model.safetensors"), load_file(expert / "model.safetensors")
    further = {name: origin[name] + 3 * (tensor - origin[name]) for name, tensor in tensors.items()}
    save_file(further, expert / "model.safetensors", {"format": "pt"})
    change, signature = measured()
    assert change == pytest.approx(3 * before[0], rel=1e-3) and signature != before[1]


def test_merges_that_are_refused(tmp_path):
    one, two = by_hand(tmp_path / "one", 1.0), by_hand(tmp_path / "two", 2.0)
    half = by_hand(tmp_path / "half", 2.0, torch.bfloat16)
    deep = by_hand(tmp_path / "deep", 2.0, num_hidden_layers=3)
    with pytest.raises(PipelineError, match="has num_hidden_layers 3"):
        open_merge(swap(bottom_layers=1, top_layers=0), {"math": one, "language": deep})
    with pytest.raises(PipelineError, match=r"merge.experts\[1\]"):
        open_merge(Soup(experts=["a", "b"]), {"0": one, "1": deep})
    open_merge(
        swap(bottom_layers=1, top_layers=0), {"math": one, "language": half}
    )  # nor an expert's
    with pytest.raises(PipelineError, match="needs merge.base"):
        open_merge(Ties(experts=["a", "b"]), {"0": one, "1": two})
    with pytest.raises(PipelineError, match="merge.base: .* has num_hidden_layers 3"):
        open_merge(Ties(experts=["a", "b"]), {"0": one, "1": two}, deep)
    with pytest.raises(PipelineError, match="the model has 2"):
        open_merge(swap(), {"math": one, "language": two})
    narrow = by_hand(tmp_path / "narrow", 1.5, torch.bfloat16)
    open_merge(
        Ties(experts=["a", "b"]), {"0": one, "1": two}, narrow
    )  # a base of other precision is no obstacle


class Recorder:
    def table(self, name, columns, rows):
        self.columns, self.rows = columns, rows


@pytest.mark.parametrize("method", ["layer_swap", "soup", "ties"])
def test_the_stage(models, tmp_path, capsys, method):
    base, math, language = (
        SimpleNamespace(folder=folder, name=f"{folder.name}-123", hash="0")
        for folder in models["llama"]
    )
    config, parents = {
        "layer_swap": (swap(), {"language": language, "math": math}),
        "soup": (Soup(experts=["/secret/a", "b"]), {"1": language, "0": math}),
        "ties": (Ties(experts=["/secret/a", "b"]), {"base": base, "0": math, "1": language}),
    }[method]
    tracker = Recorder()
    facts = make(
        SimpleNamespace(
            config=MergeStage(merge=config, runs_dir=str(tmp_path / "runs")),
            parents=parents,
            name="m-1",
        ),
        tmp_path,
        tracker,
    )

    digests = digest_tensors(tmp_path)
    assert facts["weights"].pop("made_of").startswith("merge:")
    assert facts["weights"] == {"root": weights_root(digests), "digests": digests}
    assert facts["plan"] == json.loads(json.dumps(facts["plan"]))
    said = capsys.readouterr()
    assert said.out == "" and method in said.err
    assert "math-123" in said.err and "language-123" in said.err
    assert "secret" not in said.err
    assert (tmp_path / "chat_template.jinja").read_text() == "math"
    if method == "layer_swap":
        assert [row["where"] for row in facts["plan"]] == [
            *("embedding", "layers 0-4", "layers 5-11", "layers 12-13", "final_norm", "head")
        ]
        assert "layers 0-4" in said.err and "1 language" in said.err


def test_the_stage_takes_digests_from_the_parents_manifests(models, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.merge.stage.verify_sources", lambda *_: None)
    folders = {role: tmp_path / role for role in ("math", "language", "work")}
    for role, source in (("math", models["llama"][1]), ("language", models["llama"][2])):
        shutil.copytree(source, folders[role])
        digests = dict.fromkeys(digest_tensors(source), f"blake3:of {role}")  # recognisable
        Manifest(role, "0", {"stage": "sft"}, {"weights": {"digests": digests}}).write(
            folders[role]
        )
    folders["work"].mkdir()
    parents = {
        role: SimpleNamespace(folder=folders[role], name=role) for role in ("math", "language")
    }
    config = MergeStage(merge=swap(bottom_layers=1), runs_dir=str(tmp_path))
    run = SimpleNamespace(config=config, parents=parents, name="m-1")
    digests = make(run, folders["work"], Recorder())["weights"]["digests"]
    assert digests["model.layers.0.mlp.up_proj.weight"] == "blake3:of language"
    assert digests["model.layers.5.mlp.up_proj.weight"] == "blake3:of math"
    computed = "model.embed_tokens.weight"
    assert digests[computed] == digest_tensors(folders["work"])[computed]


def test_a_byte_that_flipped_in_a_run_is_found(models, tmp_path):
    """With size and time as before. A tensor that the merge does not read may be anything."""
    folders = {role: tmp_path / role for role in ("math", "language")}
    for role, source in zip(folders, models["llama"][1:], strict=False):
        shutil.copytree(source, folders[role])
        Manifest(
            role, "0", {"stage": "sft"}, {"weights": {"digests": digest_tensors(source)}}
        ).write(folders[role])
    file = folders["math"] / "model.safetensors"
    config = MergeStage(merge=swap(bottom_layers=1), runs_dir=str(tmp_path))
    parents = {role: SimpleNamespace(folder=folders[role], name=role) for role in folders}

    def merged_with_a_flip_in(name):
        info, before = read_header(file)[name], file.stat()
        with open(file, "r+b") as stream:
            stream.seek(info.offset + 1)
            byte = stream.read(1)
            stream.seek(info.offset + 1)
            stream.write(bytes([byte[0] ^ 1]))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        work = tmp_path / name
        work.mkdir()
        return make(SimpleNamespace(config=config, parents=parents, name="m-1"), work, Recorder())

    assert merged_with_a_flip_in("model.layers.0.mlp.up_proj.weight")[
        "weights"
    ]  # of the language expert in the merge
    with pytest.raises(
        PipelineError,
        match=r"layers.5.mlp.up_proj.weight is not the tensor that the run wrote.*math",
    ):
        merged_with_a_flip_in("model.layers.5.mlp.up_proj.weight")
