"""eval.backend=vllm against the torch backend in float32: of vLLM itself (make test-vllm), or of a stand-in."""

import gc
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import Call, Make
from lm_eval.api.instance import Instance
from made_up import asked, byte_tokenizer, ended, load_model, run_of, worked, write_rows
from small_models import lora_expert
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.errors import PipelineError
from pipeline.estimate.durations import ON_GPU, History, guess
from pipeline.estimate.flops import cards
from pipeline.evaluate.model import Answering
from pipeline.evaluate.torch_backend import TorchBackend
from pipeline.extras import vllm_backend
from pipeline.extras.vllm_backend import VllmBackend, versions
from pipeline.merge.adapters import open_source
from pipeline.merge.live import merge_of_one, model_of
from pipeline.merge.merge import Merging, open_merge
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.resident import keep_models_resident
from pipeline.models.checkpoint import Checkpoint
from pipeline.runs.folders import finished_manifests
from pipeline.runs.lease import hold_lease
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.state import STATE, read_state
from pipeline.runs.stop import UNFINISHED

REAL = find_spec("vllm") is not None
LAYERS, ROOM = 4, 16
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},  # biases, a tied head
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
TIED = ["qwen2", "gemma3_text"]
ATTENTION = ["q_proj", "v_proj"]  # what the language expert changed: as LoRA on some projections


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of vLLM, which computes by transformers: it takes what it is handed, and has none of vLLM's traps."""
    versions.cache_clear()
    if not REAL:
        monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_in"))
    yield
    versions.cache_clear()


@pytest.fixture(scope="module", params=KINDS if REAL else ["llama"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A random base whose answers differ, a math expert of all its tensors, a language expert of some projections."""
    at = tmp_path_factory.mktemp(request.param)
    words, tokenizer = byte_tokenizer()
    sizes = {"vocab_size": len(words), "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512}
    torch.manual_seed(1)
    config = AutoConfig.for_model(request.param, **sizes, **ids, **KINDS[request.param])
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():  # letters are likelier than the rest, so that answers are text
        head = model.get_output_embeddings().weight
        head[[words.index(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]] *= 1.5 if request.param in TIED else 4
        if request.param == "gemma3_text":  # which scales embeddings up: the next token would be the one before
            head *= 0.02
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for role in ("base", "math", "language"):
        for name, parameter in model.named_parameters():
            changes = role == "math" or (role == "language" and any(part in name for part in ATTENTION))
            noise = torch.randn_like(parameter) * 0.3 * base[name].std().nan_to_num(0.1).clamp(min=0.05)
            parameter.data.copy_(base[name] + noise * changes)
        model.save_pretrained(at / role)
        tokenizer.save_pretrained(at / role)
    return [at / role for role in ("base", "math", "language")]


def swaps(folders: list[Path]) -> list[Merging]:
    """Nine merges, and the base: as a task vector of weight zero."""
    base, math, language = map(Checkpoint.open, folders)
    sides = {"math": math, "language": language}
    found = [
        open_merge(LayerSwap(math="m", language="l", bottom_layers=bottom, top_layers=top), sides, base, None, 1)
        for bottom, top in [(1, 0), (0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 0)]
    ]
    for scale in (0.5, -0.3, 0.0):
        method = TaskArithmetic(experts=["m", "l"], scale=scale)
        found.append(open_merge(method, {"0": math, "1": language}, base, None, 1))
    return found


def questions(until: list[str]) -> list[Instance]:
    """Seven prompts with the same exemplars before them, more than vLLM's block of 128 tokens on a CPU."""
    settings = {"until": until, "do_sample": False, "max_gen_toks": ROOM}
    shared = "An exemplar that all of them share. " * (8 if REAL else 3)
    prompts = [f"{shared}Question {'x' * (5 * at % 7)} {at}?" for at in range(7)]
    return [Instance("generate_until", {}, (prompt, settings), at) for at, prompt in enumerate(prompts)]


def choices(lengths: int) -> list[Instance]:
    """Four continuations of each of three contexts, of one token or of several."""
    return [
        Instance("loglikelihood", {}, (f"Exemplars before it. {at}?", letter * lengths), at)
        for at in range(3)
        for letter in "ABCD"
    ]


def by_torch(merge: Merging) -> Answering:
    live = model_of(merge, "float32", "cpu")
    return Answering(TorchBackend(4, model=live.model), pretrained=live.model, tokenizer=live.tokenizer)


def by_vllm(weights: Merging | Path, **settings: Any) -> Answering:
    backend = VllmBackend(4, "float32", weights, **settings)
    backend.load()
    return Answering(backend, pretrained=backend.model, tokenizer=backend.tokenizer)


def answers(lm: Answering) -> list[str]:
    return lm.generate_until(questions([]))


def test_answers_and_likelihoods_are_those_of_torch(folders: list[Path]) -> None:
    """Of a folder: with stop strings, cut off or not, choices of one token and of several."""
    torchs, vllms = load_model(folders[1], 4, "float32"), by_vllm(folders[1])
    texts = answers(torchs)
    assert len(set(texts)) > 4
    for until in [], [texts[0][:1]], [texts[1][3:5], texts[2][4:6]]:
        until = [text for text in until if "\ufffd" not in text]
        reported = [ended(lm) for lm in (torchs, vllms)]
        assert vllms.generate_until(questions(until)) == torchs.generate_until(questions(until))
        assert reported[0] == reported[1] and len(reported[0]) == 7
    for length in 1, 3:
        expected, found = (lm.loglikelihood(choices(length)) for lm in (torchs, vllms))
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-5, abs=1e-5)
    vllms.engine.engine.close()


def drawn(lm: Answering, places: list[int], draw: str, top_p: float = 0.9) -> list[str]:
    settings = {"until": [], "do_sample": True, "max_gen_toks": ROOM, "temperature": 1.5, "top_p": top_p, "draw": draw}
    asks = questions([])
    return lm.generate_until([Instance("generate_until", {}, (asks[at].args[0], settings), at) for at in places])


def test_sampled_answers_depend_on_their_draw_alone(folders: list[Path]) -> None:
    """Not on the other prompts, nor on their order; with the likeliest token alone they are the greedy ones."""
    lm = by_vllm(folders[1])
    first, again, other = drawn(lm, [0, 1, 2], "0 0"), drawn(lm, [2, 0], "0 0"), drawn(lm, [0, 1, 2], "0 1")
    assert again == [first[2], first[0]] and first != other
    assert drawn(lm, [0, 1, 2], "0 0", top_p=1e-6) == answers(lm)[:3] != first
    lm.engine.engine.close()


def test_ten_live_merges_and_back(folders: list[Path]) -> None:
    """One engine answers as torch does to each of ten merges and to the first again; a fresh one with a written merge
    answers the same."""
    with keep_models_resident():
        found, engines = [], set()
        merges = swaps(folders)[:: 1 if REAL else 5]
        for merge in [*merges, merges[0]]:
            vllms = by_vllm(merge)
            engines.add(id(vllms.engine.engine))
            found.append((answers(vllms), [value for value, _ in vllms.loglikelihood(choices(1))]))
            torchs = by_torch(merge)
            assert found[-1][0] == answers(torchs)
            assert found[-1][1] == pytest.approx(
                [value for value, _ in torchs.loglikelihood(choices(1))], rel=1e-5, abs=1e-5
            )
        assert found[0] == found[-1] and len(engines) == 1
        assert len({str(texts) for texts, _ in found}) == len(merges) == (10 if REAL else 2)
    written = folders[0].parent / "written"
    written.mkdir()
    merges[1].write(written, threads=1)
    for file in folders[0].glob("token*"):
        (written / file.name).write_bytes(file.read_bytes())
    fresh = by_vllm(written)
    assert answers(fresh) == found[1][0]
    fresh.engine.engine.close()


def attention_swaps(folders: list[Path]) -> list[Merging]:
    """Two merges that differ in the queries and values of the second layer alone, parts of what vLLM fuses."""
    base, _, language = map(Checkpoint.open, folders)
    sides = {"math": base, "language": language}
    return [
        open_merge(LayerSwap(math="m", language="l", bottom_layers=bottom, top_layers=0), sides) for bottom in (1, 2)
    ]


def test_the_layers_that_changed_are_handed_over_whole(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[list[str]] = []
    import vllm

    real = vllm.LLM.collective_rpc

    def hand_over(llm: Any, method: str, **how: Any) -> Any:
        if method == "reload_weights":
            given = list(how["kwargs"]["weights_iterator"])
            handed.append([name for name, _ in given])
            how["kwargs"] = {"weights_iterator": iter(given)}
        return real(llm, method, **how)

    monkeypatch.setattr(vllm.LLM, "collective_rpc", hand_over)
    first, second = attention_swaps(folders)
    with keep_models_resident():
        every = [name for name, _ in by_vllm(first).model.named_parameters()]
        assert handed == [every]  # in place of weights by chance
        by_vllm(first)
        assert handed == [every]
        lm = by_vllm(second)
        assert handed[1:] == [[name for name in every if name.startswith("model.layers.1.")]]
        assert answers(lm) == answers(by_torch(second))


@pytest.mark.vllm
@pytest.mark.parametrize("without", ["nothing", "the prefix cache", "a tied head packed anew"])
def test_without_its_guards_a_live_merge_is_wrong(
    folders: list[Path], without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above fails once a guard is taken out of the program."""
    if ("qwen2" if "tied" in without else "llama") not in str(folders[0]):
        return  # of one kind of model
    if without == "the prefix cache":
        monkeypatch.setattr("vllm.LLM.reset_prefix_cache", lambda self: True)
    elif without != "nothing":
        monkeypatch.setattr(vllm_backend, "pack_head", lambda model: None)
    merges = swaps(folders)
    with keep_models_resident():
        if "tied" in without and not torch.cuda.is_available():
            with pytest.raises(PipelineError, match="vLLM does not replace all weights of .*: write the merge"):
                by_vllm(merges[0])
            return
        right = [answers(by_vllm(merge)) == answers(by_torch(merge)) for merge in merges[:2]]
        assert right == [True, without != "the prefix cache"]


def lora_experts(base: Path) -> list[Path]:
    """As PEFT saves them: rank 3 on all linear layers, and rsLoRA of rank 5 on some, with other scales."""
    settings: list[dict[str, Any]] = [
        {"r": 3, "lora_alpha": 7, "target_modules": "all-linear"},
        {"r": 5, "lora_alpha": 4, "use_rslora": True, "target_modules": ATTENTION},
    ]
    for at, how in enumerate(settings):
        lora_expert(base, base.parent / f"lora{at}", at, 0.3, **how)
    return [base.parent / "lora0", base.parent / "lora1"]


def test_merges_of_lora_experts_are_whole_models_of_one_engine(folders: list[Path]) -> None:
    """Against torch: swaps, a soup, task arithmetic with a negative weight, an expert by itself, the first again."""
    math, language = (open_source(folder, folders[0]) for folder in lora_experts(folders[0]))
    sides, both = {"math": math, "language": language}, {"0": math, "1": language}
    merges = [
        open_merge(LayerSwap(math="m", language="l", bottom_layers=1, top_layers=1), sides),
        open_merge(LayerSwap(math="m", language="l", bottom_layers=2, top_layers=0), sides),
        open_merge(Soup(experts=["m", "l"]), both),
        open_merge(TaskArithmetic(experts=["m", "l"], weights=[1.0, -0.5]), both, Checkpoint.open(folders[0])),
        merge_of_one(math.folder),
    ]
    found = []
    with keep_models_resident():
        for merge in [*merges, merges[0]]:
            lm = by_vllm(merge)
            values = [value for value, _ in lm.loglikelihood(choices(3))]
            found.append((id(lm.engine.engine), answers(lm), values))
    assert found[0] == found[-1] and len({engine for engine, _, _ in found}) == 1
    for merge, (_, texts, values) in zip(merges, found, strict=False):
        torchs = by_torch(merge)
        assert texts == answers(torchs)
        expected = [value for value, _ in torchs.loglikelihood(choices(3))]
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-4)
    assert len({str(texts) for _, texts, _ in found}) == 5


# ------------------------------------------------------------------------------------------------ through the pipeline


def samples(folder: Path) -> str:
    (file,) = (folder / "samples").glob("*.jsonl")
    return file.read_text(encoding="utf-8")


def test_several_merges_equal_the_written_ones(
    folders: list[Path], data_root: Path, runs_dir: Path, make_run: Make, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-m with eval.backend=vllm, one engine; stage=merge and stage=eval of each with the torch backend."""
    started, real = [], vllm_backend.Engine
    monkeypatch.setattr(vllm_backend, "Engine", lambda start: started.append(real(start)) or started[-1])
    swap = ["merge=layer_swap", f"merge.math={folders[1]}", f"merge.language={folders[2]}"]
    asked = ["eval=mgsm_0shot", "eval.max_gen_toks=8", "eval.dtype=float32", "languages=[en]", f"data_root={data_root}"]
    by_vllm = ["eval.backend=vllm", "eval.batch_size=4"]
    grid = [f"merge.{side}_layers={'0,1,2' if REAL or side == 'bottom' else '1'}" for side in ("bottom", "top")]
    here = [f"runs_dir={runs_dir}", "tracking.mode=disabled", "launcher.workers=1"]
    scored = call("-m", "stage=eval", *swap, *grid, *asked, *by_vllm, *here, status=0)
    assert len(started) == 1 and started[0].llm is None
    runs = [Path(line) for line in scored.out.split()]
    assert len(runs) == (9 if REAL else 3)
    distinct = set()
    for run in runs:
        manifest = read_manifest(run)
        sizes = [f"merge.{name}={manifest.config['merge'][name]}" for name in ("bottom_layers", "top_layers")]
        written = make_run("stage=eval", f"checkpoint={make_run('stage=merge', *swap, *sizes)}", *asked)
        assert samples(run) == samples(written)
        distinct.add(samples(written))
        facts = manifest.facts["harness"]
        assert facts["backend"] == "vllm" and facts["engine"]["vllm"].startswith("0.")
    assert len(distinct) > len(runs) / 2


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, int], int]]:
    """Of each call of vLLM the prompts by their first stop string, which is of a language, and the runs that are shown
    as running."""
    calls: list[tuple[dict[str, int], int]] = []
    real = VllmBackend.generate

    def generate(self: VllmBackend, prompts: Any, endings: Any, *how: Any) -> None:
        states = [read_state(file.parent)["state"] for file in tmp_path.glob(f"*/.work/*/{STATE}")]
        calls.append((Counter(ending.stop[0] for ending in endings), states.count("running")))
        real(self, prompts, endings, *how)

    monkeypatch.setattr(VllmBackend, "generate", generate)
    return calls


def test_the_languages_of_an_evaluation_are_one_queue(
    folders: list[Path],
    data_root: Path,
    tmp_path: Path,
    call: Call,
    generated: list[tuple[dict[str, int], int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each answer ends by the stop strings and the length of its own language: all are those of the torch backend. A
    language that another process computes is left to it, and one that is refused stops no other."""

    def evaluated(where: str, *words: str) -> tuple[int, dict[str, Manifest]]:
        """The exit status, and the runs by their languages."""
        asked = [f"runs_dir={tmp_path / where}", "tracking.mode=disabled", f"checkpoint={folders[1]}"]
        asked += ["stage=eval", "eval=mgsm_0shot", "eval.dtype=float32", "languages=[en,de,sw]", "eval.max_gen_toks=12"]
        told = call(*asked, "eval.max_gen_toks_of={de: 5}", f"data_root={data_root}", "eval.batch_size=4", *words)
        found = [
            manifest for manifest in finished_manifests(tmp_path / where) if "versions" in manifest.facts["harness"]
        ]
        return told.status, {manifest.config["languages"][0]: manifest for manifest in found}

    for code in "de", "sw":
        rows = [worked(f"{code} problem {i}", None, 10 + i) for i in range(4)]
        write_rows(data_root / "mgsm" / code / "test.jsonl", rows)
    _, by_torch = evaluated("torch", "eval.limit=4")
    status, by_vllm = evaluated("vllm", "eval.limit=4", "eval.backend=vllm")
    assert status == 0 and generated == [({"Question:": 4, "Frage:": 4, "Swali:": 4}, 3)]
    assert by_vllm.keys() == by_torch.keys() == {"en", "de", "sw"}
    first = next(code for code in by_vllm if not by_vllm[code].facts["harness"]["found_again"])
    assert by_vllm[first].facts["harness"]["queued"] == sorted({"en", "de", "sw"} - {first})
    for code in by_torch:
        folders_of = [tmp_path / where / found[code].name for where, found in (("torch", by_torch), ("vllm", by_vllm))]
        assert samples(folders_of[0]) == samples(folders_of[1])
    assert History(by_vllm.values()).seconds.popitem()[1] == [by_vllm[first].seconds / 3]

    monkeypatch.setenv("SLURM_JOB_ID", "1")  # where a process does not wait for what others compute
    with hold_lease(tmp_path / "held" / ".work" / by_vllm["de"].hash, "held"):
        status, found = evaluated("held", "eval.limit=4", "eval.backend=vllm")
    assert status == UNFINISHED and found.keys() == {"en", "sw"}
    assert generated[1:] == [({"Question:": 4, "Swali:": 4}, 2)]

    write_rows(data_root / "mgsm" / "sw" / "test.jsonl", [worked("one " * 200, None, 1)])
    status, found = evaluated("long", "eval.limit=3", "eval.backend=vllm")
    assert status == 1 and found.keys() == {"en", "de"}
    assert [asked for asked, _ in generated[2:]] == [{"Question:": 3, "Frage:": 3}]


@pytest.mark.skipif(REAL, reason="vLLM has no batch invariance on a CPU")
@pytest.mark.parametrize("invariant", ["0", "1"])
def test_bfloat16_is_stored_by_request_where_no_batch_changes_it(
    invariant: str,
    folders: list[Path],
    data_root: Path,
    runs_dir: Path,
    make_run: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three questions, of which one was answered before, two are asked, without batch invariance all."""
    asked: list[int] = []
    real = VllmBackend.generate
    monkeypatch.setattr(
        VllmBackend, "generate", lambda self, prompts, *how: asked.append(len(prompts)) or real(self, prompts, *how)
    )
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    words = [f"checkpoint={folders[1]}", "eval=mgsm_0shot", "eval.backend=vllm", "eval.dtype=bfloat16"]
    words += [
        f"eval.max_gen_toks={4 + int(invariant)}",
        "eval.batch_size=4",
        "languages=[en]",
        f"data_root={data_root}",
    ]
    for limit in 1, 3:
        make_run("stage=eval", *words, f"eval.limit={limit}")
    assert asked == [1, 2 if invariant == "1" else 3]


# ------------------------------------------------------------------------------------------------ bad input


def test_what_vllm_raises_is_one_sentence_and_closes_it(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked of it before is not answered among the next questions."""
    with keep_models_resident():
        lm, merge = by_vllm(swaps(folders)[0]), swaps(folders)[0]
        reported, engine = ended(lm), lm.engine.engine
        with monkeypatch.context() as broken:
            llm = engine.llm.llm_engine
            broken.setattr(llm, "step", lambda: (_ for _ in ()).throw(RuntimeError("CUDA out of memory")))
            with pytest.raises(
                PipelineError, match=r"vLLM stopped \(RuntimeError: CUDA out of memory\), and nothing .*"
            ):
                answers(lm)
        assert not reported and engine.llm is None
        del llm
        gc.collect()
        assert answers(by_vllm(merge)) == answers(by_torch(merge))


def test_a_merge_of_another_shape_has_an_engine_of_its_own(folders: list[Path], tmp_path: Path) -> None:
    """Of half of the layers. The engine before has freed its memory before the other begins."""
    with keep_models_resident():
        engine = by_vllm(swaps(folders)[0]).engine.engine
        model = AutoModelForCausalLM.from_pretrained(folders[0])
        model.config.num_hidden_layers = 2
        if hasattr(model.config, "layer_types"):
            model.config.layer_types = model.config.layer_types[:2]
        model.model.layers = model.model.layers[:2]
        model.save_pretrained(tmp_path / "half")
        for file in folders[0].glob("token*"):
            (tmp_path / "half" / file.name).write_bytes(file.read_bytes())
        merge = merge_of_one(tmp_path / "half")
        half = by_vllm(merge)
        assert engine.llm is None and half.engine.engine.llm is not None
        assert answers(half) == answers(by_torch(merge))
    assert half.engine.engine.llm is None


@pytest.mark.parametrize(
    ("found", "refusal"),
    [
        ({}, r"eval.backend=vllm needs vLLM: pip install 'cross-lingual-merging\[vllm\]'"),
        ({"vllm": "0.9.1"}, "vLLM 0.9.1 is too old to replace weights: install 0.32"),
    ],
)
def test_another_installation_is_refused(found: dict[str, str], refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_backend, "package_version", lambda name: found.get(name, "absent"))
    with pytest.raises(PipelineError, match=refusal):
        versions()


def test_a_plan_knows_what_vllm_costs(tiny: Path, tmp_path: Path, data_root: Path) -> None:
    """Its graphs spare the launches, most of the time of so small a model."""
    ways: list[Any] = [{"backend": "hf"}, {"backend": "vllm"}]
    runs = [run_of(tmp_path, tiny, data_root, asked("mgsm", 0), dtype="float32", **way) for way in ways]
    torchs, vllms = (guess(run, lambda: cards()[ON_GPU]) or 0.0 for run in runs)
    assert vllms < torchs / 5
    torchs, vllms = ((guess(run, lambda: None) or 0.0) - 0.3 for run in runs)
    assert vllms < torchs
