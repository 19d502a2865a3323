"""Checkpoints written by safetensors and transformers, read back by our header reader."""

import json
import re
import struct

import pytest
import torch
from as_torch import as_torch
from blake3 import blake3
from safetensors.torch import save_file

from pipeline.errors import PipelineError
from pipeline.models.alike import same_architecture
from pipeline.models.checkpoint import (
    Checkpoint,
    digest_tensors,
    header_bytes,
    read_header,
    weights_root,
)

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "vocab_size": 3,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def tensors(dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(3, 4).to(dtype),
        "model.layers.0.mlp.up_proj.weight": torch.randn(5, 4).to(dtype),
        "model.norm.weight": torch.randn(4).to(dtype),
    }


def write(folder, weights=None, **config):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights or tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({**LLAMA, "tie_word_embeddings": True, **config})
    )
    return folder


def tiny(folder, kind, shard_size="5GB", **settings):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    sizes = dict(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
    )
    config = AutoConfig.for_model(kind, **sizes, num_key_value_heads=1, **settings)
    network = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    network.save_pretrained(folder, max_shard_size=shard_size)
    return network


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_come_back_bit_for_bit(tmp_path, dtype):
    checkpoint = Checkpoint.open(write(tmp_path / "m", tensors(dtype)))
    assert checkpoint.names == sorted(tensors())
    for name, expected in tensors(dtype).items():
        assert as_torch(checkpoint, name).dtype == dtype
        assert torch.equal(as_torch(checkpoint, name), expected)
        assert checkpoint.info(name).shape == tuple(expected.shape)
        assert checkpoint.info(name).nbytes == expected.nbytes
    with pytest.raises(KeyError, match="lm_head.weight"):
        checkpoint.info("lm_head.weight")


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path):
    folder = write(tmp_path / "m")
    before = (folder / "model.safetensors").read_bytes()
    as_torch(Checkpoint.open(folder), "model.norm.weight").zero_()
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("kind", ["llama", "qwen2", "cohere"])
def test_sharded_and_single_files_hold_the_same(tmp_path, kind):
    network = tiny(tmp_path / "single", kind)
    tiny(tmp_path / "sharded", kind, shard_size="4KB")
    single, sharded = Checkpoint.open(tmp_path / "single"), Checkpoint.open(tmp_path / "sharded")
    assert len(sharded.files) > 1
    assert single.names == sharded.names == sorted(dict(network.named_parameters()))
    for name, parameter in network.named_parameters():
        assert torch.equal(as_torch(sharded, name), parameter)
    assert digest_tensors(tmp_path / "single") == digest_tensors(tmp_path / "sharded")
    assert sharded.tied_head == (kind == "cohere")


@pytest.mark.parametrize(("kind", "tied"), [("cohere", True), ("gemma2", True), ("llama", False)])
def test_a_head_is_tied_as_its_class_says_where_the_config_does_not(tmp_path, kind, tied):
    """With a stored copy of the embeddings as head: of a tied one it is dropped."""
    copy = tensors() | {"lm_head.weight": tensors()["model.embed_tokens.weight"].clone()}
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    write(tmp_path, copy)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    found = Checkpoint.open(tmp_path)
    assert (found.tied_head, "lm_head.weight" in found.names) == (tied, not tied)


def test_a_stored_copy_of_a_tied_head_counts_once(tmp_path):
    copy = tensors() | {"lm_head.weight": tensors()["model.embed_tokens.weight"].clone()}
    assert "lm_head.weight" not in Checkpoint.open(write(tmp_path / "same", copy)).names
    other = tensors() | {"lm_head.weight": tensors()["model.embed_tokens.weight"] + 1}
    with pytest.raises(PipelineError, match="but the head is tied"):
        Checkpoint.open(write(tmp_path / "other", other))
    assert (
        "lm_head.weight"
        in Checkpoint.open(write(tmp_path / "own", other, tie_word_embeddings=False)).names
    )
    with pytest.raises(PipelineError, match="tie_word_embeddings is false"):
        Checkpoint.open(write(tmp_path / "none", tie_word_embeddings=False))


@pytest.mark.parametrize(
    "bad",
    [
        {"model_type": ["llama"]},
        {"num_hidden_layers": 10**9},
        {"n_layer": 1001},
        {"num_layers": 1001},
        {"decoder_layers": 1001},
        {"num_hidden_layers": "4"},
        {"hidden_size": -1},
        {"hidden_size": 64.5},
        {"auto_map": "evil.Model"},
        {"text_config": {"vocab_size": "big"}},
    ],
)
def test_settings_of_another_type_are_refused(tmp_path, bad):
    key, value = next(iter((bad.get("text_config") or bad).items()))
    with pytest.raises(
        PipelineError, match=re.escape(f"config.json: {key} has the value {value!r} (Input should")
    ):
        Checkpoint.open(write(tmp_path / "bad", **bad))
    assert Checkpoint.open(
        write(tmp_path / "good", hidden_size=None, unknown={"may": ["be", "anything"]})
    ).names


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(PipelineError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PipelineError, match="has no model.safetensors"):
        Checkpoint.open(tmp_path / "empty")
    (tmp_path / "empty/pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(PipelineError, match=r"pytorch_model.bin\), but only safetensors are read"):
        Checkpoint.open(tmp_path / "empty")
    save_file(tensors(), tmp_path / "empty/model.safetensors")
    with pytest.raises(PipelineError, match="has no config.json"):
        Checkpoint.open(tmp_path / "empty")


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated_files_are_refused(tmp_path, keep):
    file = write(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(PipelineError, match="truncated"):
        Checkpoint.open(tmp_path / "m")


def test_broken_headers_are_refused(tmp_path):
    file = write(tmp_path / "m") / "model.safetensors"
    whole = file.read_bytes()
    for broken in (
        whole[:8] + b"\xff" * 8 + whole[16:],
        whole.replace(b'"shape":[3,4]', b'"shape":[3,5]'),
        whole + b"\0",
        whole[:7] + b"\x01" + whole[8:],
    ):
        file.write_bytes(broken)
        with pytest.raises(PipelineError, match="model.safetensors (has|is)"):
            Checkpoint.open(tmp_path / "m")


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([-3, -4], [0, 24]),
        ([1.5, 8], [0, 24]),
        ([True, 12], [0, 24]),
        ([3, 4], [0.0, 24]),
        (None, [0, 24]),
    ],
)
def test_headers_with_numbers_that_are_no_sizes_are_refused(tmp_path, shape, offsets):
    file = (
        write(tmp_path / "m", {"model.norm.weight": torch.ones(3, 4).bfloat16()})
        / "model.safetensors"
    )
    entry = {"model.norm.weight": {"dtype": "BF16", "shape": shape, "data_offsets": offsets}}
    header = json.dumps(entry).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))
    with pytest.raises(
        PipelineError, match="is truncated or has a broken safetensors header .*Copy it again"
    ):
        Checkpoint.open(tmp_path / "m")


def test_a_missing_shard_is_named(tmp_path):
    tiny(tmp_path / "m", "llama", shard_size="4KB")
    shard = sorted((tmp_path / "m").glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(PipelineError, match=shard.name):
        Checkpoint.open(tmp_path / "m")


def test_digests_are_of_dtype_shape_and_bytes(tmp_path):
    weights = tensors(torch.float32)
    digests = digest_tensors(write(tmp_path / "m", weights))
    norm = weights["model.norm.weight"]
    expected = blake3(norm.numpy().tobytes() + b"F32 [4]\n").hexdigest()
    assert digests["model.norm.weight"] == f"blake3:{expected}"
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    assert weights_root(digests) == "blake3:" + blake3(lines.encode()).hexdigest()
    weights["model.norm.weight"][0] += 1
    changed = digest_tensors(write(tmp_path / "n", weights))
    assert [name for name in digests if digests[name] != changed[name]] == ["model.norm.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(tmp_path, dtype, value):
    weights = tensors(dtype)
    weights["model.norm.weight"][2] = torch.finfo(dtype).max  # the largest finite number passes
    digest_tensors(write(tmp_path / "m", weights))
    weights["model.norm.weight"][2] = value
    with pytest.raises(PipelineError, match="model.norm.weight holds NaN or infinite"):
        digest_tensors(write(tmp_path / "m", weights))


def test_header_bytes_are_what_safetensors_reads(tmp_path):
    from safetensors.torch import load_file

    weights = tensors(torch.float32)
    data = b"".join(weight.numpy().tobytes() for weight in weights.values())
    header = header_bytes({name: ("F32", tuple(weight.shape)) for name, weight in weights.items()})
    (tmp_path / "x.safetensors").write_bytes(header + data)
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    assert list(read_header(tmp_path / "x.safetensors")) == list(weights)


def test_another_architecture_is_named(tmp_path):
    one = Checkpoint.open(write(tmp_path / "one"))
    keys = ("merge.math", "merge.language")

    def refused(words, weights=None, **config):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with pytest.raises(PipelineError, match=words):
            same_architecture(one, Checkpoint.open(write(folder, weights, **config)), keys)

    same_architecture(one, one, keys)
    refused(
        r"merge.language: \S+ has num_hidden_layers 2, but merge.math: \S+ has \w+ 1\.",
        num_hidden_layers=2,
    )
    refused("has model_type 'qwen2', .* has model_type 'llama'", model_type="qwen2")
    refused("vocab_size 4", vocab_size=4)
    refused(r"has hidden_act 'gelu', .* has hidden_act 'silu'", hidden_act="gelu")
    refused(r"has rms_norm_eps 1e-05, .* has rms_norm_eps 1e-06", rms_norm_eps=1e-5)
    refused(r"has rope_parameters.rope_theta 500000.0, .* 10000.0", rope_theta=500000.0)
    refused(
        r"has rope_parameters.rope_theta 500000.0, .* 10000.0",
        rope_parameters={"rope_theta": 500000.0},
    )
    refused(
        r"has rope_parameters.rope_type 'linear', .* 'default'",
        rope_scaling={"type": "linear", "factor": 8.0},
    )
    refused(
        r"has architectures \['LlamaModel'\], .* \['LlamaForCausalLM'\]",
        architectures=["LlamaModel"],
    )
    refused(
        "norm.weight of shape .5., .* of shape .4.",
        tensors() | {"model.norm.weight": torch.zeros(5).bfloat16()},
    )
    refused(
        "has a model.layers.0.mlp.down_proj.weight, .* has no model.layers.0.mlp.down_proj.weight",
        tensors() | {"model.layers.0.mlp.down_proj.weight": torch.zeros(2)},
    )
    alike = dict(
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=10000,
        attention_bias=False,
    )
    harmless = dict(
        _name_or_path="x",
        transformers_version="4.44.0",
        torch_dtype="bfloat16",
        use_cache=False,
        architectures=None,
        eos_token_id=[1, 2],
        attention_dropout=0.1,
    )
    same_architecture(one, Checkpoint.open(write(tmp_path / "alike", **alike, **harmless)), keys)
    wide = Checkpoint.open(write(tmp_path / "wide", tensors(torch.float32)))
    same_architecture(one, wide, keys)
