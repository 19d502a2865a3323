"""Shared by all tests.

One small world and one set of tiny models, made through the pipeline itself.
"""

import gc
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fixture_types import Call, Make

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
os.environ |= {
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_SILENT": "true",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
os.environ.pop("WANDB_API_KEY", None)
if (
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
):  # below nohup, which tests of signals would inherit
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
import yaml
from tiny_words import FEW, TINY, WORLD, last_of

import pipeline
import pipeline.stages.rows  # hands its rows to compose
from pipeline.progress import SILENT

sys.path.append(
    str(Path(__file__).parents[1] / "scripts")
)  # small_world, which generates the small world

os.environ |= SILENT  # as in every command, before the libraries are imported
os.environ["PYTHONPATH"] = str(
    Path(pipeline.__file__).parents[1]
)  # for processes that tests start elsewhere

NEEDS = {
    "real_data": ("set PIPELINE_TEST_DATA", lambda: bool(os.environ.get("PIPELINE_TEST_DATA"))),
    "real_models": (
        "python scripts/get_smollm2.py prints why",
        lambda: True,
    ),  # skipped by its fixture
    "gpu": ("needs a GPU", lambda: _has_gpu()),
    "slurm": ("make test-slurm", lambda: bool(os.environ.get("PIPELINE_TEST_SLURM"))),
    "vllm": ("make test-vllm", lambda: find_spec("vllm") is not None),
    "latex": (
        "make test-latex",
        lambda: bool(shutil.which("pdflatex") and shutil.which("pdftotext")),
    ),
    "kill": ("make test-kill", lambda: bool(os.environ.get("KILLS"))),
    "shapes": ("make test-shapes", lambda: bool(os.environ.get("PIPELINE_TEST_SHAPES"))),
    "rounding": (
        "set PIPELINE_TEST_ROUNDING",
        lambda: bool(os.environ.get("PIPELINE_TEST_ROUNDING")),
    ),
    "browser": ("install chromium, chromium-driver and selenium", lambda: _has_browser()),
    "spbleu": ("pip install sentencepiece", lambda: find_spec("sentencepiece") is not None),
    "mergekit": (
        "make test-mergekit",
        lambda: bool(os.environ.get("PIPELINE_TEST_MERGEKIT")),
    ),
}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_browser() -> bool:
    from importlib.util import find_spec
    from shutil import which

    return bool(which("chromium") and which("chromedriver") and find_spec("selenium"))


# files of 20 to 200 seconds: they begin first, so that no worker waits long for the other's last
# file
SLOWEST = """
    stranger/test_documents.py train/test_checkpoints.py real_models/test_real_training.py
    study/test_rendered_tables.py real_models/test_real_evaluation.py train/test_shapes.py test_pipeline.py
    evaluate/test_vllm.py train/test_processes.py data/test_prefetch.py
    report/test_null_studies.py real_models/test_real_merging.py test_knobs.py study/test_local.py
    evaluate/test_harness_tasks.py train/test_trainer.py train/test_stage.py test_extras.py config/test_hardware.py
    test_progress.py test_real.py train/test_simultaneous.py test_wheel.py
    study/test_select.py evaluate/test_mgsm_steps.py config/test_compose.py evaluate/test_small_world_gates.py
    train/test_torchrun.py config/test_words.py
""".split()


# --- what was left out ---


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for marker, (remedy, there) in NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not there():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {remedy}"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line that counts the skipped tests by reason."""
    reasons = [
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
    ]
    kinds = Counter(
        kind if (kind := reason.partition(":")[0]) in NEEDS else "other" for reason in reasons
    )
    told = [
        f"{count} {kind} ({NEEDS[kind][0] if kind in NEEDS else 'see above'})"
        for kind, count in kinds.items()
    ]
    terminalreporter.write_line("left out: " + (", ".join(told) or "none"))


# --- garbage ---

modules_frozen = 0


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without garbage collections, as it imports torch: its objects would be searched each time."""
    gc.disable()
    yield
    gc.enable()


def pytest_runtest_setup() -> None:
    """Exclude what modules hold from garbage collection.

    A collection takes 0.2 s, and each training starts with one.
    """
    global modules_frozen
    if len(sys.modules) > modules_frozen:
        gc.collect()
        gc.freeze()
        modules_frozen = len(sys.modules)


# --- the program ---


@pytest.fixture(scope="session")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the shared runs are. Tests that change runs make their own."""
    return tmp_path_factory.mktemp("shared") / "runs"


@pytest.fixture(scope="session")
def make_run(runs_dir: Path) -> Make:
    """Compose a stage and make its run, W&B off: the run's folder."""
    from pipeline.config.compose import compose
    from pipeline.launch.launchers import make_single_run

    def make(*words: str) -> Path:
        return make_single_run(compose([f"runs_dir={runs_dir}", "tracking.mode=disabled", *words]))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def world(make_run: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a smaller world: 4 items a benchmark, 40 math rows, 60 rows a clone, 150 documents."""
    from small_world.files import World, pack

    from pipeline.data import small_world

    archive = tmp_path_factory.mktemp("small") / "small_world.tar.xz"
    pack(archive, World(items=4, dev_items=4, math_rows=40, language_rows=60, documents=150))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(small_world, "ARCHIVE", archive)
        return make_run("stage=data", *WORLD)


@pytest.fixture(scope="session")
def base(make_run: Make, world: Path) -> Path:
    """Return a Llama of 14 layers and width 32, trained from nothing."""
    data = ["expert=sandbox_text", f"data_root={world}", "recipe=sandbox_math", "sft.packing=false"]
    return make_run("stage=cpt", *TINY, *data, *FEW)


@pytest.fixture(scope="session")
def math_expert(make_run: Make, world: Path, base: Path) -> Path:
    start = ["model=trained", f"model.path={base}", f"data_root={world}"]
    return make_run("stage=sft", *start, "expert=math", "recipe=sandbox_math", *FEW)


@pytest.fixture(scope="session")
def language_expert(make_run: Make, world: Path, base: Path) -> Path:
    start = ["model=trained", f"model.path={base}", f"data_root={world}"]
    return make_run("stage=sft", *start, "expert=qac", "recipe=sandbox_language", *FEW)


@pytest.fixture(scope="session")
def swap(make_run: Make, math_expert: Path, language_expert: Path) -> Path:
    experts = [f"merge.math={math_expert}", f"merge.language={language_expert}"]
    return make_run(
        "stage=merge", "merge=layer_swap", *experts, "merge.bottom_layers=3", "merge.top_layers=1"
    )


@pytest.fixture(scope="session")
def scored(make_run: Make, world: Path, swap: Path) -> Path:
    asked = ["eval=sandbox", "eval.max_gen_toks=4", "eval.limit=3", "languages=[en,qac]"]
    return make_run("stage=eval", f"checkpoint={swap}", f"data_root={world}", *asked)


@pytest.fixture(scope="session")
def analyzed(make_run: Make, math_expert: Path, language_expert: Path) -> Path:
    return make_run(
        "stage=analyze", f"checkpoint=[{math_expert},{language_expert}]", "analyze.threshold=1e-4"
    )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Return kind -> (base, math, language): folders of random tiny bfloat16 models."""
    import torch
    from small_models import LAYERS
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    made: dict[str, list[Path]] = {}
    for kind in ("llama", "qwen2", "cohere"):
        sizes = dict(
            hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1
        )
        config = AutoConfig.for_model(kind, **sizes, num_hidden_layers=LAYERS, vocab_size=64)
        folders, start = [], {}
        for seed, role in enumerate(("base", "math", "language")):
            torch.manual_seed(seed)
            folder = tmp_path_factory.mktemp(kind) / role
            network = AutoModelForCausalLM.from_config(config)
            for (
                name,
                parameter,
            ) in network.named_parameters():  # norms too: a constant would hide a wrong owner
                start.setdefault(name, torch.randn_like(parameter) * 0.1)
                moved = 0 if role == "base" else torch.randn_like(parameter) * 0.05
                parameter.data = start[name] + moved
            network.to(torch.bfloat16).save_pretrained(folder)
            words = Tokenizer(WordLevel({"a": 0, "?": 1}, "?"))
            PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
            with open(folder / "tokenizer.json", "a") as file:
                file.write("\n" * seed)  # files that differ and read alike
            (folder / "chat_template.jinja").write_text(role)
            folders.append(folder)
        made[kind] = folders
    return made


@pytest.fixture
def tiny_table(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the command of table=tiny.

    It is conf/tables/sandbox.yaml with a tiny base, few items and steps, without controls and
    without the second multiple-choice task.
    """
    from pipeline.config import conf

    copy = tmp_path / "conf"
    shutil.copytree(conf.folder(), copy)
    start = {"model": "trained", "model.path": str(base)}
    few = {key: yaml.safe_load(value) for key, value in (word.split("=") for word in FEW)}
    small = dict(word.split("=") for word in WORLD)
    sandbox: dict[str, Any] = yaml.safe_load((copy / "tables/sandbox.yaml").read_text())
    del sandbox["every"]["model"]
    sandbox["every"] |= start | few
    sandbox["axes"] |= {
        "counts": {f"{n}+0": {"bottom": n, "top": 0} for n in (1, 2)},
        "density": [0.2, 0.8],
    }
    sandbox["runs"]["world"] = {"stage": "data", **small}
    sandbox["columns"] = {
        name: column for name, column in sandbox["columns"].items() if "global_mmlu" not in name
    }
    sandbox["score"] |= {"eval.limit": 2, "eval.max_gen_toks": 4}
    for row in ("layer swap", "TIES"):
        sandbox["rows"][row]["by"] |= {"eval.max_gen_toks": 4}
    (copy / "tables/tiny.yaml").write_text(
        yaml.safe_dump(sandbox | {"name": "tiny", "controls": False}, sort_keys=False)
    )
    claims = yaml.safe_load((copy / "claims/sandbox.yaml").read_text())["sandbox"]
    (copy / "claims/tiny.yaml").write_text(yaml.safe_dump({"tiny": claims}, sort_keys=False))
    monkeypatch.setattr(conf, "folder", lambda: copy)
    return ["table=tiny", f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal: a shell's background commands ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def without_options_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what --config-dir added to this process after the test."""
    from pipeline.files import ADDED_CONF

    monkeypatch.setenv(ADDED_CONF, "")


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs the command line in this process.

    It returns the exit status, standard output and standard error, and checks the expected status.
    Of settings with the same key the last counts.
    """
    from pipeline.__main__ import main

    def command_line(*words: str, status: int | None = None) -> SimpleNamespace:
        capfd.readouterr()
        found = main(last_of(words))
        told = capfd.readouterr()
        assert status in (None, found), told.err[-2000:]
        return SimpleNamespace(status=found, out=told.out, err=told.err)

    return command_line
