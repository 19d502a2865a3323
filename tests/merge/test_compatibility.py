"""What must not be merged, and writes that fail: one sentence, and nothing that looks finished."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc

import pytest
import torch
from as_torch import as_torch
from safetensors.torch import load_file, save_file
from small_models import by_hand, stacked, swap

from pipeline.__main__ import main
from pipeline.errors import PipelineError
from pipeline.merge.adapters import open_source
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.reset import Reset
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.methods.ties import Ties
from pipeline.merge.open_merge import open_merge
from pipeline.models.checkpoint import Checkpoint, digest_tensors

TIES = Ties(experts=["a", "b"])


def copy_of(folder, tmp_path, name, change=None, **config):
    target = tmp_path / name
    shutil.copytree(folder, target)
    if change:
        save_file(change(load_file(target / "model.safetensors")), target / "model.safetensors")
    facts = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(facts))
    return target


def test_a_quantized_model_is_refused_though_its_tensors_are_floats(tmp_path):
    good, told = Checkpoint.open(stacked(tmp_path / "good", 2, 1)), {"quant_method": "fbgemm_fp8"}
    bad = Checkpoint.open(stacked(tmp_path / "bad", 2, 2, quantization_config=told))
    for sources, base, key in (
        ({"0": good, "1": bad}, None, r"merge.experts\[1\]"),
        ({"0": bad, "1": bad}, None, r"merge.experts\[0\]"),
        ({"0": good}, bad, "merge.base"),
    ):
        with pytest.raises(
            PipelineError, match=f"{key}: config.json of .*bad has quantization_config .fbgemm_fp8."
        ):
            open_merge(TaskArithmetic(experts=["a"] * len(sources)), sources, base or good)


METHODS = {
    "ties": TIES,
    "task arithmetic": TaskArithmetic(experts=["a", "b"]),
    "soup by magnitude": Soup(experts=["a", "b"], weights="magnitude"),
    "soup": Soup(experts=["a", "b"]),
    "swap": LayerSwap(math="a", language="b", bottom_layers=4),
    "reset": Reset(expert="b", threshold=0.001),
}
NO_BASE = (("soup", "base"), ("swap", "base"))  # they read none


@pytest.mark.parametrize(
    ("row", "value"), [(0, float("nan")), (5, float("-inf"))]
)  # a look at a few rows sees one
@pytest.mark.parametrize(
    ("method", "broken"),
    [
        (one, broken)
        for one in METHODS
        for broken in ("base", "language")
        if (one, broken) not in NO_BASE
    ],
)
def test_what_is_not_finite_is_named_by_file_and_tensor(
    models, tmp_path, method, broken, row, value
):
    folders = dict(zip(("base", "math", "language"), models["llama"], strict=True))
    name, config = "model.layers.3.mlp.down_proj.weight", METHODS[method]

    def broke(tensors):
        tensors[name][row, 3] = value
        return tensors

    folders[broken] = copy_of(folders[broken], tmp_path, broken, broke)
    base, *experts = (Checkpoint.open(folder) for folder in folders.values())
    roles = {"swap": ("math", "language"), "reset": ("expert",)}.get(method, ("0", "1"))
    sources = dict(zip(roles, experts[1:] if method == "reset" else experts, strict=True))
    (tmp_path / "out").mkdir()
    with pytest.raises(
        PipelineError, match=f"{broken}/model.safetensors: {name} holds NaN or infinite values"
    ):
        open_merge(config, sources, None if method in ("soup", "swap") else base).write(
            tmp_path / "out"
        )


def test_an_adapter_that_is_not_finite_is_named_too(models, tmp_path):
    base, expert = Checkpoint.open(models["llama"][0]), models["llama"][1]
    for index, broken in enumerate(("lora_A", "none")):
        folder, module = tmp_path / str(index), "base_model.model.model.layers.2.self_attn.q_proj"
        folder.mkdir()
        factors = {"lora_A": torch.ones(2, 16), "lora_B": torch.ones(16, 2)}
        factors |= {broken: factors[broken] * float("nan")} if broken in factors else {}
        save_file(
            {f"{module}.{key}.weight": factor for key, factor in factors.items()},
            folder / "adapter_model.safetensors",
        )
        settings = {
            "peft_type": "LORA",
            "lora_alpha": 2,
            "base_model_name_or_path": str(base.folder),
        }
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        (folder / "tokenizer.json").write_text((expert / "tokenizer.json").read_text())
    with pytest.raises(
        PipelineError,
        match="0/adapter_model.safetensors: model.layers.2.self_attn.q_proj.weight holds",
    ):
        sources = {role: open_source(tmp_path / role) for role in ("0", "1")}
        open_merge(TIES, sources, base).write(tmp_path)


def test_an_expert_equal_to_its_base_is_merged_with_a_note(tmp_path, capfd):
    base = stacked(tmp_path / "base", 2, 0)
    same, moved = copy_of(base, tmp_path, "same"), stacked(tmp_path / "moved", 2, 1, base)
    words = [
        "stage=merge",
        "merge=task_arithmetic",
        f"merge.base={base}",
        f"runs_dir={tmp_path / 'runs'}",
    ]
    assert main([*words, f"merge.experts=[{same},{moved}]", "merge.scale=1.0"]) == 0
    output, errors = capfd.readouterr()
    assert "note: same is equal to its base" in errors and "moved is equal" not in errors
    merged = load_file(f"{output.strip().splitlines()[-1]}/model.safetensors")
    expected = load_file(moved / "model.safetensors")
    origin = load_file(base / "model.safetensors")
    for name, tensor in merged.items():  # base + 0 + (moved - base), rounded as float32 rounds it
        change = expected[name].float() - origin[name].float()
        assert torch.equal(tensor, (origin[name].float() + change).to(tensor.dtype))


@pytest.fixture
def readers(tmp_path):
    """Return two experts with byte-level BPE, and a function that opens their merge.

    A test changes files of one expert before it opens the merge.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["hello Hello 12 12"] * 9,
        trainers.BpeTrainer(special_tokens=["</s>", "<unk>"], initial_alphabet=alphabet),
    )
    base = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(base)
    folders = [stacked(tmp_path / name, 2, seed) for seed, name in enumerate(("math", "language"))]
    for folder in folders:
        shutil.copytree(base, folder, dirs_exist_ok=True)

    def opened(change=lambda found: None, file="tokenizer.json"):
        found = json.loads((base / file).read_text())
        change(found)
        (folders[1] / file).write_text(json.dumps(found))
        sources = dict(zip(("math", "language"), map(Checkpoint.open, folders), strict=True))
        return open_merge(swap(bottom_layers=1, top_layers=0), sources)

    return opened


def test_another_format_of_the_same_tokenizer_is_no_obstacle(readers):
    def other_format(found):
        found["model"]["merges"] = [
            pair.split(" ") if isinstance(pair, str) else " ".join(pair)
            for pair in found["model"]["merges"]
        ]
        found["version"] = "1.0"

    assert readers() and readers(other_format)


def test_another_vocabulary(readers):
    def swapped(found):
        vocabulary = found["model"]["vocab"]
        one, other = list(vocabulary)[-2:]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]

    with pytest.raises(
        PipelineError,
        match="merge.language: the tokenizers of .* and of merge.math .* different vocabularies",
    ):
        readers(swapped)


def test_tokenizers_of_one_vocabulary_are_alike_whatever_else_their_files_say(readers):
    assert readers(lambda found: found.update(normalizer={"type": "NFKC"}))


def test_a_narrower_base_is_widened_exactly(tmp_path):
    """bfloat16 base, float32 experts: 1 + 1/512 is no bfloat16, and no bits of either are lost."""
    base = by_hand(tmp_path / "base", 1.0, torch.bfloat16)
    experts = {"0": by_hand(tmp_path / "a", 1 + 2**-9), "1": by_hand(tmp_path / "b", 1 + 2**-10)}
    merge = open_merge(TaskArithmetic(experts=["a", "b"]), experts, base)
    assert as_torch(merge, "model.norm.weight").tolist() == [1 + 2**-9 + 2**-10] * 2
    mixed = open_merge(Soup(experts=["a", "b"]), {"0": experts["0"], "1": base})
    assert as_torch(mixed, "model.norm.weight").tolist() == [1 + 2**-10] * 2


def test_a_source_that_shrinks_under_the_merge(tmp_path, monkeypatch):
    math, language = (
        stacked(tmp_path / name, 2, seed) for seed, name in enumerate(("math", "language"))
    )
    merge = open_merge(
        swap(bottom_layers=1, top_layers=0),
        {"math": Checkpoint.open(math), "language": Checkpoint.open(language)},
    )
    file = language / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    (tmp_path / "out").mkdir()
    with pytest.raises(PipelineError, match="became shorter while it was read"):
        merge.write(tmp_path / "out")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_copy_file_range_the_bytes_are_the_same(tmp_path, monkeypatch, number):
    math, language = (
        Checkpoint.open(stacked(tmp_path / name, 3, seed))
        for seed, name in enumerate(("math", "language"))
    )
    known = {"math": digest_tensors(math.folder), "language": digest_tensors(language.folder)}
    written = []
    for name in ("ranges", "reading"):
        (tmp_path / name).mkdir()
        if name == "reading":
            monkeypatch.setattr(
                os, "copy_file_range", lambda *_: (_ for _ in ()).throw(OSError(number, "no"))
            )
        merge = open_merge(
            swap(bottom_layers=1, top_layers=1), {"math": math, "language": language}
        )
        assert merge.write(tmp_path / name, recorded=known) == digest_tensors(tmp_path / name)
        written.append((tmp_path / name / "model.safetensors").read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize("call", ["pwrite", "copy_file_range"])
def test_no_space_at_each_write(tmp_path, monkeypatch, call):
    """Whichever write of weights finds the disk full.

    The error names the file, and goes on to the caller.
    """
    math, language = (
        Checkpoint.open(stacked(tmp_path / name, 2, seed))
        for seed, name in enumerate(("math", "language"))
    )
    known = {
        role: digest_tensors(one.folder) for role, one in (("math", math), ("language", language))
    }
    real, count = getattr(os, call), 0

    def full(*words):
        nonlocal count
        count += 1
        if count == fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*words)

    monkeypatch.setattr(os, call, full)
    done = False
    for fails in range(1, 50):
        folder, count = tmp_path / str(fails), 0
        folder.mkdir()
        merge = open_merge(
            swap(bottom_layers=1, top_layers=0), {"math": math, "language": language}
        )
        if done:
            break
        try:
            merge.write(folder, threads=1, recorded=known if call == "copy_file_range" else None)
            done = True
        except OSError as error:
            done = False
            assert error.errno == errno.ENOSPC and error.filename == str(
                folder / "model.safetensors"
            )
            assert not (folder / "config.json").exists()
    assert done and fails > 2


KILLED = """
import os, sys, time
from pipeline.merge import write
real = write._put_tensor
def slow(*words):
    found = real(*words)
    print("written", flush=True)
    time.sleep(60)
    return found
write._put_tensor = slow
from pipeline.__main__ import main
main(sys.argv[1:])
"""


def swap_words(folder):
    """Return the command of a swap of two made-up checkpoints."""
    math, language = (
        stacked(folder / name, 2, seed) for seed, name in enumerate(("math", "language"))
    )
    words = ["stage=merge", "merge=layer_swap", f"merge.math={math}", f"merge.language={language}"]
    return [*words, "merge.top_layers=0", f"runs_dir={folder}/runs", "tracking.mode=disabled"]


def test_a_kill_in_the_middle_of_a_write_leaves_nothing_that_looks_finished(tmp_path):
    runs_dir, words = tmp_path / "runs", [*swap_words(tmp_path), "merge.bottom_layers=1"]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert any(
        "written" in line for line in process.stderr
    )  # what is printed goes to standard error inside a stage
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert {path.name for path in runs_dir.iterdir()} - {".digests"} == {".work"}
    assert not list(runs_dir.glob(".work/*/manifest.json"))
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().startswith(str(runs_dir))


def test_a_swap_of_runs_is_made_without_torch(tmp_path, capfd):
    """Runs hold what transformers saved.

    Of folders from elsewhere it says which shapes config.json asks for.
    """
    words = swap_words(tmp_path)
    runs = []
    for layers in ("merge.bottom_layers=1", "merge.bottom_layers=2"):
        assert main([*words, layers]) == 0
        runs.append(capfd.readouterr().out.strip())
    words[2:4] = [f"merge.math={runs[0]}", f"merge.language={runs[1]}"]
    words.append("merge.bottom_layers=1")
    code = (
        "import sys; from pipeline.__main__ import main; status = main(sys.argv[1:]);"
        "assert status == 0 and not {'torch', 'transformers'} & set(sys.modules), status"
    )
    subprocess.run([sys.executable, "-c", code, *words], check=True)


@pytest.mark.parametrize("method", ["soup", "ties"])
def test_memory_is_that_of_pieces_whatever_the_size_of_a_tensor(tmp_path, method):
    """A tensor of 16 MB in float32 and 8 pieces.

    Two threads together stay below a handful of pieces.
    """
    random, folders = torch.Generator().manual_seed(0), []
    start = torch.randn(4096, 1024, generator=random) * 0.1
    for name in ("base", "a", "b"):
        moved = start + (0 if name == "base" else 0.02) * torch.randn(start.shape, generator=random)
        layer = {
            f"model.layers.0.mlp.{part}_proj.weight": torch.ones(2, 2) * 0.5
            for part in ("up", "down")
        }
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        save_file({"model.embed_tokens.weight": moved, **layer}, folders[-1] / "model.safetensors")
        facts = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": True}
        (folders[-1] / "config.json").write_text(json.dumps(facts))
    base, *experts = map(Checkpoint.open, folders)
    config = Soup(experts=["a", "b"]) if method == "soup" else TIES
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    try:
        merge = open_merge(config, dict(zip("01", experts, strict=True)), base, threads=2)
        merge.write(tmp_path / "out", threads=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (8e6 if method == "soup" else 24e6), peak
