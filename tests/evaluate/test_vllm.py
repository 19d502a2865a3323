"""eval.backend=vllm against the torch backend in float32.

Of vLLM itself (make test-vllm), or of a stand-in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from fixture_types import Call, Make
from lm_eval.api.instance import Instance
from made_up import byte_tokenizer, ended, load_model
from small_models import lora_expert
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.errors import PipelineError
from pipeline.evaluate.backend import without_weights
from pipeline.evaluate.model import Answering
from pipeline.evaluate.torch_backend import TorchBackend
from pipeline.extras import vllm_backend
from pipeline.extras.vllm_backend import VllmBackend, versions
from pipeline.merge.adapters import open_source
from pipeline.merge.live import merge_of_one, model_of
from pipeline.merge.merge import Merging
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.open_merge import open_merge
from pipeline.models.checkpoint import Checkpoint
from pipeline.runs.manifest import read_manifest

REAL = find_spec("vllm") is not None
LAYERS, ROOM = 4, 16
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},  # biases, a tied head
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
TIED = ["qwen2", "gemma3_text"]
ATTENTION = ["q_proj", "v_proj"]  # what the language expert changed: as LoRA on some projections


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Return a stand-in for vLLM that computes with transformers.

    It takes what it gets, and has none of vLLM's traps.
    """
    versions.cache_clear()
    if not REAL:
        monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_in"))
    yield
    versions.cache_clear()


@pytest.fixture(scope="module", params=KINDS if REAL else ["llama"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write a random base, a math expert of all tensors, and a language expert of some."""
    at = tmp_path_factory.mktemp(request.param)
    words, tokenizer = byte_tokenizer()
    sizes = {
        "vocab_size": len(words),
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
    }
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.2,
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512}
    torch.manual_seed(1)
    config = AutoConfig.for_model(request.param, **sizes, **ids, **KINDS[request.param])
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():  # letters are likelier than the rest, so that answers are text
        head = model.get_output_embeddings().weight
        head[[words.index(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]] *= (
            1.5 if request.param in TIED else 4
        )
        if (
            request.param == "gemma3_text"
        ):  # which scales embeddings up: the next token would be the one before
            head *= 0.02
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for role in ("base", "math", "language"):
        for name, parameter in model.named_parameters():
            changes = role == "math" or (
                role == "language" and any(part in name for part in ATTENTION)
            )
            noise = (
                torch.randn_like(parameter) * 0.3 * base[name].std().nan_to_num(0.1).clamp(min=0.05)
            )
            parameter.data.copy_(base[name] + noise * changes)
        model.save_pretrained(at / role)
        tokenizer.save_pretrained(at / role)
    return [at / role for role in ("base", "math", "language")]


def merges_of(folders: list[Path]) -> list[Merging]:
    """Return a layer swap and a task vector with negative weight."""
    base, math, language = map(Checkpoint.open, folders)
    swap = LayerSwap(math="m", language="l", bottom_layers=2, top_layers=1)
    negative = TaskArithmetic(experts=["m", "l"], scale=-0.3)
    return [
        open_merge(swap, {"math": math, "language": language}, base, None, 1),
        open_merge(negative, {"0": math, "1": language}, base, None, 1),
    ]


def questions(until: list[str]) -> list[Instance]:
    """Return seven prompts with the same exemplars.

    They exceed vLLM's block of 128 tokens on a CPU.
    """
    settings = {"until": until, "do_sample": False, "max_gen_toks": ROOM}
    shared = "An exemplar that all of them share. " * (8 if REAL else 3)
    prompts = [f"{shared}Question {'x' * (5 * at % 7)} {at}?" for at in range(7)]
    return [
        Instance("generate_until", {}, (prompt, settings), at) for at, prompt in enumerate(prompts)
    ]


def choices(lengths: int) -> list[Instance]:
    """Four continuations of each of three contexts, of one token or of several."""
    return [
        Instance("loglikelihood", {}, (f"Exemplars before it. {at}?", letter * lengths), at)
        for at in range(3)
        for letter in "ABCD"
    ]


def by_torch(merge: Merging) -> Answering:
    live = model_of(merge, "float32", "cpu")
    return Answering(
        TorchBackend(4, model=live.model), pretrained=live.model, tokenizer=live.tokenizer
    )


@contextmanager
def by_vllm(weights: Merging | Path) -> Iterator[Answering]:
    with TemporaryDirectory() as scratch:
        backend = VllmBackend(4, "float32", weights, Path(scratch))
        model, tokenizer = without_weights(weights)
        yield Answering(backend, pretrained=model, tokenizer=tokenizer)
        backend.close()


def answers(lm: Answering) -> list[str]:
    return lm.generate_until(questions([]))


def test_answers_and_likelihoods_are_those_of_torch(folders: list[Path]) -> None:
    """Of a folder: with stop strings, cut off or not, choices of one token and of several."""
    torchs = load_model(folders[1], 4, "float32")
    texts = answers(torchs)
    assert len(set(texts)) > 4
    with by_vllm(folders[1]) as vllms:
        for until in [], [texts[0][:1]], [texts[1][3:5], texts[2][4:6]]:
            until = [text for text in until if "\ufffd" not in text]
            reported = [ended(lm) for lm in (torchs, vllms)]
            assert vllms.generate_until(questions(until)) == torchs.generate_until(questions(until))
            assert reported[0] == reported[1] and len(reported[0]) == 7
        for length in 1, 3:
            expected, found = (lm.loglikelihood(choices(length)) for lm in (torchs, vllms))
            assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
            assert [value for value, _ in found] == pytest.approx(
                [value for value, _ in expected], rel=1e-5, abs=1e-5
            )


def drawn(lm: Answering, places: list[int], draw: str, top_p: float = 0.9) -> list[str]:
    settings = {
        "until": [],
        "do_sample": True,
        "max_gen_toks": ROOM,
        "temperature": 1.5,
        "top_p": top_p,
        "draw": draw,
    }
    asks = questions([])
    return lm.generate_until(
        [Instance("generate_until", {}, (asks[at].args[0], settings), at) for at in places]
    )


def test_sampled_answers_depend_on_their_draw_alone(folders: list[Path]) -> None:
    """Not on the other prompts, nor on their order.

    With the likeliest token alone they are the greedy ones.
    """
    with by_vllm(folders[1]) as lm:
        first, again, other = (
            drawn(lm, [0, 1, 2], "0 0"),
            drawn(lm, [2, 0], "0 0"),
            drawn(lm, [0, 1, 2], "0 1"),
        )
        assert again == [first[2], first[0]] and first != other
        assert drawn(lm, [0, 1, 2], "0 0", top_p=1e-6) == answers(lm)[:3] != first


def lora_experts(base: Path) -> list[Path]:
    """Write LoRA experts as PEFT saves them.

    One has rank 3 on all linear layers, the other rsLoRA of rank 5 on some, with other scales.
    """
    settings: list[dict[str, Any]] = [
        {"r": 3, "lora_alpha": 7, "target_modules": "all-linear"},
        {"r": 5, "lora_alpha": 4, "use_rslora": True, "target_modules": ATTENTION},
    ]
    for at, how in enumerate(settings):
        lora_expert(base, base.parent / f"lora{at}", at, 0.3, **how)
    return [base.parent / "lora0", base.parent / "lora1"]


def test_a_merge_is_scored_as_a_whole_model(folders: list[Path]) -> None:
    """Whole experts and LoRA experts are compared with torch.

    The LoRA experts form a swap, a soup, and an expert on its own.
    """
    math, language = (open_source(folder, folders[0]) for folder in lora_experts(folders[0]))
    merges = [
        *merges_of(folders),
        open_merge(
            LayerSwap(math="m", language="l", bottom_layers=1), {"math": math, "language": language}
        ),
        open_merge(Soup(experts=["m", "l"]), {"0": math, "1": language}),
        merge_of_one(math.folder),
    ]
    found = set()
    for merge in merges[:: 1 if REAL else 2]:
        torchs = by_torch(merge)
        with by_vllm(merge) as lm:
            texts = answers(lm)
            assert texts == answers(torchs)
            values, expected = (
                [value for value, _ in one.loglikelihood(choices(3))] for one in (lm, torchs)
            )
            assert values == pytest.approx(expected, rel=1e-5, abs=1e-4)
        found.add(str(texts))
    assert len(found) == (5 if REAL else 3)


# --- through the pipeline ---


def samples(folder: Path) -> str:
    (file,) = (folder / "samples").glob("*.jsonl")
    return file.read_text(encoding="utf-8")


def test_merges_equal_the_written_ones_and_leave_no_weights(
    folders: list[Path], data_root: Path, runs_dir: Path, make_run: Make, call: Call
) -> None:
    """-m with eval.backend=vllm; stage=merge and stage=eval of each with the torch backend."""
    swap = [
        "merge=layer_swap",
        f"merge.math={folders[1]}",
        f"merge.language={folders[2]}",
        "merge.top_layers=1",
    ]
    asked = [
        "eval=mgsm_0shot",
        "eval.max_gen_toks=8",
        "eval.dtype=float32",
        "languages=[en]",
        f"data_root={data_root}",
    ]
    by_vllm = ["eval.backend=vllm", "eval.batch_size=4", "merge.bottom_layers=0,2"]
    here = [f"runs_dir={runs_dir}", "tracking.mode=disabled", "launcher.workers=1"]
    scored = call("-m", "stage=eval", *swap, *asked, *by_vllm, *here, status=0)
    runs = [Path(line) for line in scored.out.split()]
    assert len(runs) == 2
    assert not [weights for run in runs for weights in run.rglob("*.safetensors")]
    distinct = set()
    for run in runs:
        manifest = read_manifest(run)
        size = f"merge.bottom_layers={manifest.config['merge']['bottom_layers']}"
        written = make_run(
            "stage=eval", f"checkpoint={make_run('stage=merge', *swap, size)}", *asked
        )
        assert samples(run) == samples(written)
        distinct.add(samples(written))
        facts = manifest.facts["harness"]
        assert facts["backend"] == "vllm" and facts["engine"]["vllm"].startswith("0.")
    assert len(distinct) == 2


# --- bad input ---


def test_a_task_with_generation_settings_of_its_own_is_refused(folders: list[Path]) -> None:
    settings = {"until": [], "do_sample": False, "max_gen_toks": ROOM, "repetition_penalty": 1.2}
    with (
        by_vllm(folders[1]) as lm,
        pytest.raises(
            PipelineError,
            match="passes on no generation settings of a task .* Use eval.backend=hf",
        ),
    ):
        lm.generate_until([Instance("generate_until", {}, ("Question?", settings), 0)])


def test_a_missing_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_backend, "package_version", lambda name: "absent")
    refusal = r"eval.backend=vllm needs vLLM. Run pip install 'cross-lingual-merging\[vllm\]'"
    with pytest.raises(PipelineError, match=refusal):
        versions()
