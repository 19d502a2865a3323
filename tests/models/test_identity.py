"""The identity of a folder that no run made, computed by hand with the blake3 package."""

import json
import os
import struct

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save_file

from pipeline import files
from pipeline.files import FileState, cached_digests
from pipeline.models.identity import folder_digest

NAMES = ("config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_digests_of", {})
    (tmp_path / "m").mkdir()
    tensors = {
        "b": torch.arange(6.0).reshape(2, 3),
        "a": torch.ones(700_000).bfloat16(),
        "empty": torch.ones(0, 3),
    }
    save_file(tensors, tmp_path / "m/model.safetensors", {"format": "pt"})
    (tmp_path / "m/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "m/tokenizer.json").write_text("{}")
    return tmp_path / "m"


def digest_of(folder, runs_dir=None):
    return folder_digest(folder, [folder / name for name in NAMES], runs_dir)


def by_hand(folder):
    """Return the digest by hand: header, `blake3:`, then bytes, dtype and shape of each tensor.

    Tensors are in the order of their bytes.
    """
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    told, tensors = data[:start], {}
    del header["__metadata__"]
    for name, one in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = one["data_offsets"]
        text = data[start + begin : start + end] + f"{one['dtype']} {one['shape']}\n".encode()
        tensors[name] = f"blake3:{blake3(text).hexdigest()}"
        told += tensors[name].encode()
    found = {name: blake3((folder / name).read_bytes()).hexdigest() for name in NAMES}
    found["model.safetensors"] = blake3(told).hexdigest()
    lines = "".join(f"{name} blake3:{found[name]}\n" for name in sorted(found))
    return f"blake3:{blake3(lines.encode()).hexdigest()}", tensors


def test_the_digest_of_a_folder_and_of_its_tensors_is_as_by_hand(model):
    expected, tensors = by_hand(model)
    assert digest_of(model) == expected
    assert cached_digests(FileState.now(model / "model.safetensors"))["tensors"] == tensors


@pytest.mark.parametrize("name", NAMES)
def test_one_byte_changes_it(model, name):
    before, data = digest_of(model), bytearray((model / name).read_bytes())
    data[-1] ^= 1
    (model / name).write_bytes(data)
    os.utime(model / name, ns=(1, 1))
    assert digest_of(model) != before and digest_of(model) == by_hand(model)[0]


def test_files_that_are_links_have_the_digests_of_what_they_link(model, tmp_path):
    """As in the Hub's cache, whose blobs have no suffix."""
    (tmp_path / "linked").mkdir()
    for number, name in enumerate(NAMES):
        os.rename(model / name, tmp_path / str(number))
        (tmp_path / "linked" / name).symlink_to(tmp_path / str(number))
    assert digest_of(tmp_path / "linked", tmp_path / "runs") == by_hand(tmp_path / "linked")[0]
