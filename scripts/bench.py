"""Compare speed with a named peer in the same run.

Times are CPU seconds of one thread, and seconds of the clock on a GPU.

    python scripts/bench.py train       # each method; peer: TRL's SFTTrainer on the same rows
    python scripts/bench.py merge       # 2.5 GB of random bfloat16; peer: cp
                  [--mergekit PYTHON]   # peer: mergekit in this Python
    python scripts/bench.py evaluate --model $(python scripts/get_smollm2.py) --data_root DIR
                  [--vllm]              # peer: HFLM
    python scripts/bench.py launch      # 1,000 trainings submitted; a table as jobs and here
                  [--slurm]
    python scripts/bench.py plan        # plans with 10,000 finished runs; peer: the imports
    python scripts/bench.py report      # 12,264 results; peer: the imports; page in Chromium

The ratio of a row is our time divided by the peer's: lower is faster. --record writes
results/bench/NAME.json. It marks a row whose ratio is 10 % above the ratio in the record of this
name, and exits with 1. Other work on the machine changes CPU seconds less than clock seconds, and
ratios less than both. The record includes the load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests/slurm")]

from pipeline.runs.provenance import git_state, machine_facts, package_versions  # noqa: E402

SLOWER = 1.1  # A row is marked if its ratio exceeds this times the recorded ratio.
QUEUED = 75  # exit status of a command whose jobs are all in Slurm's queue
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    asked = parser.parse_args()
    load = os.getloadavg()
    file = ROOT / f"results/bench/{asked.record or asked.name}.json"
    earlier_ratios = recorded_ratios(file)
    measure = globals()[asked.name]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # Slurm's nodes read it
        for row in measure(asked, Path(folder)):
            earlier = earlier_ratios.get(row["what"], math.inf)
            if row.get("ratio", 0.0) > SLOWER * earlier:
                row["slower_than"] = earlier
            rows.append(row)
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if asked.record is not None:
        write_record(file, asked, load, rows)
    return int(any("slower_than" in row for row in rows))


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", choices=("train", "merge", "evaluate", "launch", "plan", "report"))
    add("--rounds", type=int, default=3, help="repetitions; the median is reported")
    add("--small", action="store_true", help="use tiny sizes, to check that the script works")
    add("--model", type=Path, help="evaluate: a model's folder")
    add("--data_root", type=Path, help="evaluate: a folder with mgsm/ and optionally mgsm_steps/")
    add("--questions", type=int, default=64, help="evaluate: questions per language")
    add("--languages", nargs="+", default=["en", "sw"], help="evaluate")
    add("--dtype", default="float32", help="evaluate")
    add("--batch_size", type=int, default=8, help="evaluate")
    add("--vllm", action="store_true", help="evaluate: also time vLLM (needs the extra vllm)")
    add("--mergekit", metavar="PYTHON", help="merge: a Python with mergekit")
    slurm_help = "launch: also run on the two Slurm nodes of tests/slurm, as root"
    add("--slurm", action="store_true", help=slurm_help)
    record_help = "write a record; its default name is the measurement's"
    add("--record", nargs="?", const="", metavar="NAME", help=record_help)


def recorded_ratios(file: Path) -> dict[str, float]:
    """Return the ratio of each row of a record, or an empty dict without a record."""
    if not file.is_file():
        return {}
    ratios = {}
    for row in json.loads(file.read_text()).get("rows", ()):
        if row.get("ratio"):
            ratios[row["what"]] = row["ratio"]
    return ratios


def write_record(
    file: Path, asked: argparse.Namespace, load: tuple[float, float, float], rows: list[Row]
) -> None:
    shown = vars(asked).copy()
    for key in ("model", "data_root", "vllm", "mergekit"):
        shown.pop(key, None)
    record = {
        "machine": machine_facts(),
        "versions": package_versions(),
        "git": git_state(),
        "load": load,
        "asked": shown,
        "rows": rows,
    }
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def row(what: str, seconds: float, peer: str, peer_seconds: float, **more: Any) -> Row:
    return {
        "what": what,
        "seconds": round(seconds, 3),
        "peer": peer,
        "peer_seconds": round(peer_seconds, 3),
        "ratio": round(seconds / peer_seconds, 3),
        **more,
    }


class MemoryWatcher(threading.Thread):
    """A thread that samples the anonymous memory of a process until `done` is set."""

    def __init__(self, process: int) -> None:
        super().__init__()
        self.status = Path(f"/proc/{process}/status")
        self.done = threading.Event()
        self.peak_kb = 0

    def run(self) -> None:
        while not self.done.wait(0.005):
            # The file disappears, or loses its memory lines, when the process ends.
            with contextlib.suppress(OSError, IndexError):
                after_label = self.status.read_text().split("RssAnon:")[1]
                self.peak_kb = max(self.peak_kb, int(after_label.split()[0]))


def command(words: list[str], status: int = 0, **environment: str) -> dict[str, Any]:
    """Run a process and return its times, its peak memory and the JSON that it prints last.

    Times are seconds of the clock and of the CPU. Memory is anonymous memory.
    """
    cpu_before = children_cpu_seconds()
    begun = time.perf_counter()
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | environment,
    )
    watcher = MemoryWatcher(process.pid)
    watcher.start()
    said, _ = process.communicate()
    wall = time.perf_counter() - begun
    watcher.done.set()
    watcher.join()
    if process.returncode != status:
        shown = " ".join(words)[:400]
        raise SystemExit(f"{shown}: status {process.returncode}, expected {status}")
    cpu = children_cpu_seconds() - cpu_before
    last_line = said.strip().splitlines()[-1:]
    return {
        "wall": wall,
        "cpu": cpu,
        "anonymous_mb": watcher.peak_kb // 1024,
        "said": last_line,
    }


def children_cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def pipeline(words: list[str], status: int = 0, **environment: str) -> float:
    """Return the CPU seconds of a command of this package."""
    asked = [sys.executable, "-m", "pipeline", *words, "tracking.mode=disabled"]
    return command(asked, status, WANDB_MODE="disabled", **environment)["cpu"]


def imports(rounds: int) -> float:
    """Return the median CPU seconds of a command that fails before it reads a file.

    Such a command only imports the package.
    """
    unknown_key = ["stage=status", "status.nothing=1"]
    return statistics.median(pipeline(unknown_key, 1) for _ in range(rounds))


# --- train ---


def train(asked: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield a row per training method, timed in turns with a bare SFTTrainer.

    Both have the same weights, rows and arguments. A row has medians of the rounds.
    """
    import torch
    from datasets import Dataset
    from small_world.tokenizer import make_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback
    from trl import SFTTrainer

    from pipeline.config.data import Data, Expert
    from pipeline.config.stages import TrainStage
    from pipeline.config.training import Model, Partition, Sft
    from pipeline.train.load import choose_parameters
    from pipeline.train.trainer import Trainer, plan_steps, trainer_arguments

    torch.set_num_threads(1)
    if asked.small:
        layers, width, counted = 4, 64, 4
    else:
        layers, width, counted = 16, 192, 8
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    cut = Partition("B", layers // 4, layers // 8, False)
    ways: dict[str, tuple[dict[str, Any], Any]] = {"bare": ({}, None), "full": ({}, None)}
    ways["lora"] = ({"adapter": "lora"}, None)
    for side in ("math", "language"):
        ways[f"partial, {side}"] = ({"method": "partial", "side": side}, cut)
    ways["simultaneous"] = ({"method": "simultaneous"}, cut)

    class Clock(TrainerCallback):
        ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.process_time())

    def step(name: str) -> float:
        """Return the median CPU seconds of a step, without the first two steps."""
        knobs, partition = ways[name]
        steps = counted + 2
        torch.manual_seed(0)
        sft = Sft(
            name=name,
            precision="fp32",
            batch_size=4,
            seq_length=128,
            learning_rate=1e-6,
            schedule="constant",
            steps=steps,
            **knobs,
        )
        model, parts = choose_parameters(LlamaForCausalLM(config), sft, partition)
        expert = Expert(name="e", side="math")
        stage = TrainStage(
            stage="sft",
            model=Model(name="m"),
            expert=expert,
            data=Data(),
            sft=sft,
            partition=partition,
        )
        args = trainer_arguments(stage, text=False, validated=False, output=folder)
        ids = torch.randint(4, 1024, (steps * 4, 128)).tolist()
        rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
        shared: dict[str, Any] = {
            "model": model,
            "args": args,
            "processing_class": make_tokenizer(),
        }
        trainer: Any
        if name == "bare":
            trainer = SFTTrainer(train_dataset=rows, **shared)
        else:
            datasets = dict.fromkeys(parts, rows)
            trainer = Trainer(train_dataset=datasets, sft=sft, parts=parts, **shared)
        plan_steps(args, sft, steps)
        Clock.ends = []
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Clock())
        trainer.train()
        return statistics.median(end - begun for begun, end in pairwise(Clock.ends[1:]))

    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(asked.rounds):
        # The order alternates, so that no method always runs first.
        order = list(ways)
        if number % 2 == 0:
            order.reverse()
        for name in order:
            found[name].append(step(name))
    bare_times = found.pop("bare")
    bare_seconds = 1e3 * statistics.median(bare_times)
    for name, times in found.items():
        ratios = [round(mine / bare, 3) for mine, bare in zip(times, bare_times, strict=True)]
        seconds = 1e3 * statistics.median(times)
        more = {"ratios": ratios, "layers": layers, "width": width}
        yield row(f"1,000 steps of {name}", seconds, "SFTTrainer", bare_seconds, **more)


# --- merge ---

# The swap copies the math expert's outside parameters, so that it computes no tensor.
OUTSIDE = {"embeddings": "math", "final_norm": "math", "head": "math"}
MERGES: dict[str, tuple[str, dict[str, Any]]] = {
    "swap": ("layer_swap", {"bottom_layers": 3, **OUTSIDE}),
    "soup": ("soup", {}),
    "TIES": ("ties", {}),
    "swap of folders that no run made": ("layer_swap", {}),
}
ENGINE = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import bench
print(json.dumps(bench.one_merge(sys.argv[2], bench.Path(sys.argv[3]))))
"""
MERGEKIT = """
import json, sys, time, yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
config = MergeConfiguration.model_validate(yaml.safe_load(open(sys.argv[1])))
begun, cpu = time.perf_counter(), time.process_time()
run_merge(config, sys.argv[2], options=MergeOptions(quiet=True, copy_tokenizer=False))
print(json.dumps({"seconds": time.process_time() - cpu, "wall": time.perf_counter() - begun}))
"""


def merge(asked: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield a row per merge of experts with recorded digests, without imports.

    The files are in the page cache, as after a training.
    """
    if asked.small:
        sizes = (64, 128, 8, 4, 2, 200)
    else:
        sizes = (2048, 8192, 16, 32, 8, 128256)
    make_checkpoints(folder, *sizes)
    names = ["cp", *MERGES]
    if asked.mergekit:
        names += [f"mergekit {name}" for name in list(MERGES)[:3]]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(asked.rounds):
        for name in names:
            prepare_merge(folder)
            found[name].append(timed_merge(name, folder, asked.mergekit))

    def median(name: str, key: str) -> float:
        return statistics.median(times[key] for times in found[name])

    for name in MERGES:
        for peer in ("cp", f"mergekit {name}"):
            if peer not in found:
                continue
            wall = round(median(name, "wall") / median(peer, "wall"), 2)
            more = {"wall_ratio": wall, "anonymous_mb": median(name, "anonymous_mb")}
            # The records have this name, and ratios are compared by it.
            what = f"{name}, beside {peer}"
            yield row(what, median(name, "seconds"), peer, median(peer, "seconds"), **more)


def prepare_merge(folder: Path) -> None:
    """Delete earlier outputs and read the weights into the page cache."""
    for place in ("out", "runs"):
        shutil.rmtree(folder / place, ignore_errors=True)
    for path in folder.glob("*/*.safetensors"):
        path.read_bytes()
    os.sync()


def timed_merge(name: str, folder: Path, mergekit: str) -> dict[str, float]:
    """Return the times and the peak memory of one merge, or of a copy by cp."""
    out = str(folder / "out")
    if name == "cp":
        made = command(["cp", "-r", str(folder / "math"), out])
        times = {"seconds": made["cpu"], "wall": made["wall"]}
    elif name.startswith("mergekit "):
        config = for_mergekit(name.removeprefix("mergekit "), folder)
        file = folder / "merge.json"
        file.write_text(json.dumps(config))
        made = command([mergekit, "-c", MERGEKIT, str(file), out])
        times = json.loads(made["said"][0])
    else:
        scripts = str(Path(__file__).parent)
        made = command([sys.executable, "-c", ENGINE, scripts, name, str(folder)])
        times = json.loads(made["said"][0])
    return {**times, "anonymous_mb": made["anonymous_mb"]}


def make_checkpoints(
    folder: Path, width: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int
) -> None:
    """Write a base, and a math and a language expert 0.002 away from it.

    They have manifests of finished runs. The folders foreign_* have no manifest.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pipeline.models.checkpoint import digest_tensors

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    for role in ("base", "math", "language"):
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                if role == "base":
                    parameter.copy_(0.02 * noise)
                else:
                    parameter.copy_(parameter + 0.002 * noise)
        model.save_pretrained(folder / role, max_shard_size="1GB")
        word_level = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
        tokenizer = {"version": "1.0", "added_tokens": [], "model": word_level}
        (folder / role / "tokenizer.json").write_text(json.dumps(tokenizer))
        if role != "base":
            shutil.copytree(folder / role, folder / f"foreign_{role}", copy_function=os.link)
        weights = {"digests": digest_tensors(folder / role)}
        made = {
            "name": role,
            "hash": role * 16,
            "decided_by": {"stage": "sft"},
            "facts": {"weights": weights},
            "cost": {"seconds": 1.0},
        }
        (folder / role / "manifest.json").write_text(json.dumps(made))
    # A merge does not trust files that changed within the last two seconds.
    time.sleep(3)


def opened(name: str, folder: Path) -> Any:
    """Open a merge, which reads headers only."""
    from pipeline.merge.methods import METHODS
    from pipeline.merge.open_merge import open_merge
    from pipeline.models.checkpoint import Checkpoint

    method, knobs = MERGES[name]
    math_, language = (Checkpoint.open(folder / role) for role in ("math", "language"))
    if method == "layer_swap":
        experts = {"math": math_, "language": language}
        config = METHODS[method](math="m", language="l", **knobs)
    else:
        experts = {"0": math_, "1": language}
        config = METHODS[method](experts=["m", "l"], **knobs)
    base = None
    if method == "ties":
        base = Checkpoint.open(folder / "base")
    return open_merge(config, experts, base)


def known_digests(merge: Any) -> dict[str, dict[str, str]]:
    """Return the digests of the experts' tensors, as their manifests record them."""
    from pipeline.merge import digests

    return digests.known_digests(merge, merge.layout.folder)


def one_merge(name: str, folder: Path) -> dict[str, float]:
    """Return the seconds of one merge in this process, without imports."""
    import pipeline.merge.stage
    import pipeline.runs.tracking  # noqa: F401
    from pipeline.config.compose import compose
    from pipeline.launch.launchers import make_single_run

    foreign = name == list(MERGES)[-1]
    words = ["stage=merge", "merge=layer_swap", "merge.bottom_layers=3", "merge.top_layers=0"]
    words += [f"merge.{side}={folder}/foreign_{side}" for side in ("math", "language")]
    words += [f"merge.{part}={side}" for part, side in OUTSIDE.items()]
    words += [f"runs_dir={folder}/runs", "threads=1", "tracking.mode=disabled"]
    config: Any = compose(words)
    begun, cpu = time.perf_counter(), time.process_time()
    if foreign:
        make_single_run(config)
    else:
        (folder / "out").mkdir()
        merged = opened(name, folder)
        merged.write(folder / "out", recorded=known_digests(merged), threads=1)
    return {"seconds": time.process_time() - cpu, "wall": time.perf_counter() - begun}


def for_mergekit(name: str, folder: Path) -> dict[str, Any]:
    """Return the same merge as a configuration of mergekit, with bfloat16 output."""
    math_, language = (str(folder / role) for role in ("math", "language"))
    layers = json.loads((folder / "base/config.json").read_text())["num_hidden_layers"]
    if name == "swap":
        cuts = [(0, 3, language), (3, layers - 2, math_), (layers - 2, layers, language)]
        slices = [
            {"sources": [{"model": model, "layer_range": [low, high]}]} for low, high, model in cuts
        ]
        return {"merge_method": "passthrough", "dtype": "bfloat16", "slices": slices}
    knobs = {"weight": 1.0}
    if name.startswith("TIES"):
        knobs["density"] = 0.2
    models = [{"model": model, "parameters": knobs} for model in (math_, language)]
    if name == "soup":
        return {"merge_method": "linear", "dtype": "bfloat16", "models": models}
    return {
        "merge_method": "ties",
        "base_model": str(folder / "base"),
        "dtype": "float32",
        "out_dtype": "bfloat16",
        "models": models,
    }


# --- evaluate ---


def evaluate(asked: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield a row per kind of request, answered by the harness' HFLM and by our engine."""
    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from pipeline.config.evaluation import Eval, EvalTask
    from pipeline.evaluate.model import open_model
    from pipeline.evaluate.prompts import harness_tamed, load_tasks
    from pipeline.evaluate.tasks import task_specs
    from pipeline.hub.lock import Lock

    if not (asked.model and asked.data_root):
        raise SystemExit("bench.py evaluate needs --model FOLDER and --data_root FOLDER")
    torch.set_num_threads(1)

    def requests(task: EvalTask, language: str, tokens: int) -> list[Instance]:
        place = Path(tempfile.mkdtemp(dir=folder))
        with harness_tamed():
            settings = Eval("", [task], max_gen_toks=tokens)
            specs = task_specs(settings, [language], asked.data_root, place)
            (loaded,) = load_tasks(specs, Lock())
            loaded.build_all_requests(samples=range(asked.questions))
        return loaded.instances

    if torch.cuda.is_available():
        clock = time.perf_counter
    else:
        clock = time.process_time
    ours = open_model(asked.model, asked.batch_size, asked.dtype)
    ours.load()
    ours.share_prefix = True
    stock = HFLM(pretrained=ours.model, tokenizer=ours.tokenizer, batch_size=asked.batch_size)
    engines: dict[str, Any] = {"ours": ours}
    if asked.vllm:
        engines["vLLM"] = vllm_model(asked)
    tokens = 128
    if asked.small:
        tokens = 16

    def seconds(lm: Any, kind: str, asks: list[Instance]) -> tuple[list[Any], float]:
        begun = clock()
        answers = getattr(lm, kind)(asks, disable_tqdm=True)
        return answers, clock() - begun

    for language in asked.languages:
        generated = requests(EvalTask("mgsm", 8), language, tokens)
        letters = []
        for request in requests(EvalTask("mgsm", 5), language, 1):
            for letter in "ABCD":
                arguments = (request.args[0], f" {letter}")
                letters.append(Instance("loglikelihood", {}, arguments, 0))
        sets = {
            "8-shot answers": ("generate_until", generated),
            "5-shot letters": ("loglikelihood", letters),
        }
        if (asked.data_root / "mgsm_steps" / language).is_dir():
            steps = requests(EvalTask("mgsm_steps", 4), language, 1)
            sets["choices of several tokens"] = ("loglikelihood", steps)
        for what, (kind, asks) in sets.items():
            theirs, peer = seconds(stock, kind, asks)
            for name, lm in engines.items():
                found, mine = seconds(lm, kind, asks)
                more: Row = {"requests": len(asks), **differences(kind, found, theirs)}
                yield row(f"{what}, {language}, {name}", mine, "HFLM", peer, **more)
    # A command's start takes CPU time only, so it is not timed on a GPU.
    if not torch.cuda.is_available():
        yield evaluation_start(asked, folder)


def differences(kind: str, found: list[Any], theirs: list[Any]) -> Row:
    """Return how much the results of requests differ from HFLM's."""
    pairs = zip(found, theirs, strict=True)
    if kind == "generate_until":
        return {"other_answers": sum(mine != other for mine, other in pairs)}
    largest = max(abs(mine[0] - other[0]) for mine, other in pairs)
    return {"largest_difference": largest}


def evaluation_start(asked: argparse.Namespace, folder: Path) -> Row:
    """Return the CPU time of an evaluation command with one answer of one token."""
    model, data_root = asked.model.resolve(), asked.data_root.resolve()
    words = ["stage=eval", f"checkpoint={model}", "eval=mgsm_0shot", "languages=[en]"]
    words += [f"data_root={data_root}", "eval.limit=1", "eval.max_gen_toks=1", "threads=1"]
    times = []
    for number in range(asked.rounds):
        times.append(pipeline([*words, f"runs_dir={folder}/{number}"]))
    imported = "import lm_eval.models.huggingface, lm_eval.evaluator, datasets"
    libraries = [sys.executable, "-c", imported]
    peer = statistics.median(command(libraries)["cpu"] for _ in range(asked.rounds))
    seconds = statistics.median(times)
    return row("a command with one answer of one token", seconds, "imports of lm_eval", peer)


def vllm_model(asked: argparse.Namespace) -> Any:
    from pipeline.evaluate.model import open_model
    from pipeline.extras.vllm_backend import VllmBackend

    # Weights are loaded from the model's folder, so no file is written to `scratch`.
    backend = partial(VllmBackend, scratch=asked.model)
    lm = open_model(asked.model, asked.batch_size, asked.dtype, backend)
    lm.load()
    return lm


# --- launch ---

STAND_IN = """#!/bin/sh
case $(basename $0) in
  scontrol) echo MaxArraySize = 1001 ;;
  sbatch) date +%s%N ;;
esac
"""
SMALL = """
name: small
axes: {density: [0.2, 0.8]}
every: {model: sandbox, data_root: world, threads: 1, sft.steps: 8, sft.warmup_steps: 1, eval.limit: 20}
runs:
  world: {stage: data, expert: sandbox, expert.world.items: 40}
  math: {stage: sft, expert: math, recipe: sandbox_math}
  language: {stage: sft, expert: qac, recipe: sandbox_language}
  TIES: {merge: ties, merge.experts: [math, language], merge.density: '{density}'}
score: {eval: mgsm_0shot, eval.max_gen_toks: 40, in: qac}
columns: {en: {in: en}, qac: {in: qac}}
rows: {math: {run: math}, language: {run: language}, TIES: {run: TIES, best: [density]}}
"""
COUNTED = """#!{python}
import resource, subprocess, sys
status = subprocess.call([sys.executable, *sys.argv[2:]])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open({file!r}, "a") as counted:
    print(used.ru_utime + used.ru_stime, file=counted)
sys.exit(status)
"""


def first_step(folder: Path) -> float:
    """Return the CPU seconds of the job of SMALL's first training until its first step.

    The data run is finished before.
    """
    runs_dir = folder / "step"
    table = ["stage=table", f"table={folder}/small.yaml", f"runs_dir={runs_dir}"]
    table += ["launcher=slurm", "launcher.gpus=0", "launcher.dry_run=true"]
    # A set number of workers gives one array per level. The default is a single job.
    pipeline([*table, "launcher.workers=1"])
    plan_folder = runs_dir / ".slurm-dry-run"
    lines = (plan_folder / "plan.jsonl").read_text().splitlines()
    tasks = [json.loads(line) for line in lines]
    kinds = dict.fromkeys((task["level"], task["kind"]) for task in tasks)
    worker = [sys.executable, "-m", "pipeline.launch.worker", "task", str(plan_folder)]
    trainings = [task for task in tasks if task["stage"] == "sft"]
    training = trainings[0]
    for level, kind in kinds:
        if level < training["level"]:
            command([*worker, str(level), kind])
    state = runs_dir / ".work" / training["hash"] / "state.json"
    task_words = [*worker, str(training["level"]), training["kind"]]
    process = subprocess.Popen(task_words, stderr=subprocess.DEVNULL)
    while not (state.is_file() and json.loads(state.read_text()).get("step")):
        if process.poll() is not None:
            raise SystemExit(f"the job of {training['name']} ended before its first step")
        time.sleep(0.02)
    process.kill()
    _, process.returncode, used = os.wait4(process.pid, 0)
    return used.ru_utime + used.ru_stime


def executable(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o755)
    return file


def launch(asked: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield the times of submissions to a stand-in for sbatch, of a job, and of a table.

    The stand-in leaves only our own time. The job is timed until its first step. The table runs by
    Slurm and on this machine.
    """
    for name in ("squeue", "scontrol", "sbatch"):
        executable(folder / name, STAND_IN)
    count = 1000
    if asked.small:
        count = 20
    seeds = ",".join(str(seed) for seed in range(count))
    words = ["-m", "stage=sft", "expert=math", "model=sandbox", "recipe=sandbox_math"]
    words += [f"seed={seeds}", f"runs_dir={folder}/submitted", "threads=1"]
    words += ["launcher=slurm", "launcher.gpus=0"]
    path = f"{folder}:{os.environ['PATH']}"
    seconds = pipeline(words, QUEUED, PATH=path)
    what = f"submit {count:,} trainings"
    yield row(what, seconds, "imports", imports(asked.rounds))
    (folder / "small.yaml").write_text(SMALL)
    libraries = command([sys.executable, "-c", "from trl import SFTTrainer"])["cpu"]
    what = "a training's job to its first step"
    yield row(what, first_step(folder), "import of SFTTrainer", libraries)
    if asked.slurm:
        yield table_as_jobs(folder)


def table_as_jobs(folder: Path) -> Row:
    """Return the CPU seconds of a table's jobs, and of one worker on this machine."""
    from cluster import two_nodes

    table = ["stage=table", f"table={folder}/small.yaml"]
    here = pipeline([*table, f"runs_dir={folder}/here", "launcher.workers=1"])
    counted = folder / "cpu"
    wrap = executable(folder / "counted", COUNTED.format(python=sys.executable, file=str(counted)))
    words = [*table, f"runs_dir={folder}/jobs", "launcher=slurm", "launcher.gpus=0"]
    words += ["launcher.memory=900M", f"launcher.wrap={wrap}"]
    words += ['launcher.options=["--exclusive","--nodelist=n1"]']
    with two_nodes() as cluster:
        submitting = pipeline(words, QUEUED, **cluster.environment)
        cluster.idle(3600)
        pipeline(words, **cluster.environment)
    jobs = sum(map(float, counted.read_text().splitlines()))
    return row("a small table as jobs", submitting + jobs, "the same by one worker here", here)


# --- plan, report ---


def plan(asked: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield the times of plans if many finished runs exist.

    The runs have manifests like real ones, 14 KB each, with other names and hashes.
    """
    from importlib.resources import files

    manifest = files("pipeline") / "data/sandbox_base/manifest.json"
    text = manifest.read_text(encoding="utf-8")
    shipped = json.loads(text)
    runs_dir, tables = folder / "runs", folder / "conf/tables"
    count = 10_000
    if asked.small:
        count = 100
    for number in range(count):
        digits = f"{number:08x}{0:056x}"  # A folder's name has the first twelve digits.
        run = runs_dir / f"other-{number}-{digits[:12]}"
        run.mkdir(parents=True)
        with_hash = text.replace(shipped["hash"], digits)
        (run / "manifest.json").write_text(with_hash.replace(shipped["name"], run.name))
    tables.mkdir(parents=True)
    zones = {}
    for bottom in range(3):
        for top in range(3):
            zones[f"{bottom}+{top}"] = {"bottom": bottom, "top": top}
    table = {"name": "all", "defaults": ["layer_swapping_table1"], "axes": {"t": zones}}
    (tables / "all.yaml").write_text(json.dumps(table))
    peer = imports(asked.rounds)
    commands = {
        "plan of layer_swapping_table1 with all 81 configurations": ["stage=plan", "table=all"]
    }
    for name in ("unreasonable_table3", "sandbox_full"):
        commands[f"plan of {name}"] = ["stage=plan", f"table={name}"]
    commands["status"] = ["stage=status"]
    places = [f"runs_dir={runs_dir}", f"--config-dir={folder / 'conf'}"]
    for name, words in commands.items():
        seconds = statistics.median(pipeline([*words, *places]) for _ in range(asked.rounds))
        yield row(name, seconds, "imports", peer)


MANY = """
name: many
title: Many merges
axes: {language: [qaa, qab, qac], seed: SEEDS, b: [1, 2, 3, 4, 5, 6], u: [0, 1],
  density: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]}
every: {model: sandbox, data_root: world}
runs:
  world: {stage: data, expert: sandbox}
  base: {}
  math expert: {stage: sft, expert: math, recipe: sandbox_math, seed: "{seed}"}
  language expert: {stage: sft, expert: "{language}", recipe: sandbox_language, seed: "{seed}"}
  swap: {merge: layer_swap, merge.math: math expert, merge.language: language expert, merge.bottom_layers: "{b}",
    merge.top_layers: "{u}"}
  soup: {merge: soup, merge.experts: [math expert, language expert]}
  TIES: {merge: ties, merge.experts: [math expert, language expert], merge.density: "{density}"}
score: {eval: mgsm_0shot, eval.max_gen_toks: 40, mean: [seed]}
columns: {"{language}: mgsm": {in: "{language}"}, "{language}: mgsm en": {in: en}}
rows:
  base: {run: base}
  math expert: {run: math expert}
  language expert: {run: language expert}
  "layer swap {b}+{u}": {run: swap}
  soup: {run: soup}
  "TIES {density}": {run: TIES}
"""
INTERACTIVE = """
const done = arguments[arguments.length - 1];
const [load] = performance.getEntriesByType("navigation");
const [paint] = performance.getEntriesByName("first-contentful-paint");
const start = performance.now(), interactive = Math.max(load.loadEventEnd, paint.startTime + paint.duration);
document.getElementById("answers").closest("details").open = true;
const shown = () => document.querySelector("#list tbody tr") ? done({interactive, answers: performance.now() - start})
  : requestAnimationFrame(shown);
requestAnimationFrame(shown);
"""


def report(asked: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield the times of a report on made-up finished runs.

    The runs have 24 models, three languages, and 100 answers each. The page shows 10,000 answers.
    """
    from made_up_runs import finish

    from pipeline.config.compose import compose
    from pipeline.runs.graph import order_runs
    from pipeline.tables.planned_runs import Planning

    seeds = list(range(15))
    if asked.small:
        seeds = [0]
    (folder / "many.yaml").write_text(MANY.replace("SEEDS", str(seeds)))
    words = [f"table={folder}/many.yaml", f"runs_dir={folder}/runs"]
    planning = Planning.of(compose(["stage=report", *words]))  # type: ignore[arg-type]
    finish(order_runs(planning.targets()))
    peer = imports(asked.rounds)
    page = folder / "runs/reports/many/index.html"
    commands = {
        "stage=report": ["stage=report", *words],
        "stage=export": ["stage=export", *words, f"export.to={folder}/many.zip"],
    }
    for name, arguments in commands.items():
        process = [sys.executable, "-m", "pipeline", *arguments]
        made = [command(process) for _ in range(asked.rounds)]
        lines = (page.parent / "results.csv").read_text(encoding="utf-8").splitlines()
        memory = max(one["anonymous_mb"] for one in made)
        seconds = statistics.median(one["cpu"] for one in made)
        more = {"results": len(lines) - 1, "anonymous_mb": memory}
        yield row(name, seconds, "imports", peer, **more)
    yield {"what": "the page", "bytes": page.stat().st_size, **browser_milliseconds(page)}


def browser_milliseconds(page: Path, rounds: int = 5) -> Row:
    """Return medians in headless Chromium, in milliseconds.

    `interactive` is the time until the page is painted and its script has run. `answers` is the
    time from opening its answers until they are there. Needs Debian's chromium and chromium-driver.
    """
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(word)
    options.binary_location = shutil.which("chromium")
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        timings = []
        for _ in range(rounds):
            driver.get("about:blank")
            driver.get(page.absolute().as_uri())
            timings.append(driver.execute_async_script(INTERACTIVE))
        medians = {}
        for name in timings[0]:
            median = statistics.median(timing[name] for timing in timings)
            medians[f"{name}_ms"] = round(median)
        return {"chromium": driver.capabilities["browserVersion"], **medians}
    finally:
        driver.quit()


if __name__ == "__main__":
    sys.exit(main())
