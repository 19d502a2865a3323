"""Measure speed beside a named peer in the same run.

Times are CPU seconds of one thread, and seconds of the clock on a GPU.

    python scripts/bench.py train       # each method; peer: TRL's SFTTrainer on the same rows
    python scripts/bench.py merge       # 2.5 GB of random bfloat16; peer: cp
                  [--mergekit PYTHON]   # peer: mergekit in this Python
    python scripts/bench.py evaluate --model $(python scripts/get_smollm2.py) --data_root DIR
                  [--vllm]              # peer: HFLM
    python scripts/bench.py launch      # 1,000 trainings submitted; a table as jobs and here
                  [--slurm]
    python scripts/bench.py plan        # plans beside 10,000 finished runs; peer: the imports
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests/slurm")]

from pipeline.runs.provenance import git_state, machine_facts, package_versions  # noqa: E402

SLOWER = 1.1  # times the record's ratio
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=("train", "merge", "evaluate", "launch", "plan", "report"))
    parser.add_argument(
        "--rounds", type=int, default=3, help="of each measurement; the median stands"
    )
    parser.add_argument("--small", action="store_true", help="as little as shows that it works")
    parser.add_argument("--model", type=Path, help="evaluate: a folder")
    parser.add_argument(
        "--data_root", type=Path, help="evaluate: a folder with mgsm/, and mgsm_steps/ if there"
    )
    parser.add_argument("--questions", type=int, default=64, help="evaluate: of a language")
    parser.add_argument("--languages", nargs="+", default=["en", "sw"], help="evaluate")
    parser.add_argument("--dtype", default="float32", help="evaluate")
    parser.add_argument("--batch_size", type=int, default=8, help="evaluate")
    parser.add_argument("--vllm", action="store_true", help="evaluate: vLLM too, of the extra vllm")
    parser.add_argument("--mergekit", metavar="PYTHON", help="merge: one that has mergekit")
    parser.add_argument(
        "--slurm",
        action="store_true",
        help="launch: on the Slurm of two nodes of tests/slurm, as root",
    )
    parser.add_argument(
        "--record", nargs="?", const="", metavar="NAME", help="by default that of the measurement"
    )
    asked = parser.parse_args()
    load, file = os.getloadavg(), ROOT / f"results/bench/{asked.record or asked.name}.json"
    rows: list[Row] = []
    known = {}
    if file.is_file():
        known = json.loads(file.read_text())
    before = {}
    for row in known.get("rows", ()):
        if row.get("ratio"):
            before[row["what"]] = row["ratio"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # Slurm's nodes read it
        for row in globals()[asked.name](asked, Path(folder)):
            if row.get("ratio", 0.0) > SLOWER * before.get(row["what"], math.inf):
                row["slower_than"] = before[row["what"]]
            rows.append(row)
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if asked.record is not None:
        shown = {}
        for key, value in vars(asked).items():
            if key not in ("model", "data_root", "vllm", "mergekit"):
                shown[key] = value
        about = {
            "machine": machine_facts(),
            "versions": package_versions(),
            "git": git_state(),
            "load": load,
        }
        file.write_text(
            json.dumps({**about, "asked": shown, "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    return int(any("slower_than" in row for row in rows))


def row(what: str, seconds: float, peer: str, peer_seconds: float, **more: Any) -> Row:
    times = {"seconds": round(seconds, 3), "peer": peer, "peer_seconds": round(peer_seconds, 3)}
    return {"what": what, **times, "ratio": round(seconds / peer_seconds, 3), **more}


def command(words: list[str], status: int = 0, **environment: str) -> dict[str, Any]:
    """Run a process and return its times, its peak memory and the JSON that it prints last.

    Times are seconds of the clock and of the CPU. Memory is anonymous memory.
    """
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | environment,
    )
    peak, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            with contextlib.suppress(OSError, IndexError):
                peak[0] = max(
                    peak[0],
                    int(
                        Path(f"/proc/{process.pid}/status")
                        .read_text()
                        .split("RssAnon:")[1]
                        .split()[0]
                    ),
                )

    watcher = threading.Thread(target=sample)
    watcher.start()
    said, _ = process.communicate()
    wall = time.perf_counter() - begun
    done.set()
    watcher.join()
    if process.returncode != status:
        raise SystemExit(f"{' '.join(words)[:400]}: status {process.returncode}, not {status}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "wall": wall,
        "cpu": cpu,
        "anonymous_mb": peak[0] // 1024,
        "said": said.strip().splitlines()[-1:],
    }


def pipeline(words: list[str], status: int = 0, **environment: str) -> float:
    """CPU seconds of a command of ours."""
    asked = [sys.executable, "-m", "pipeline", *words, "tracking.mode=disabled"]
    return command(asked, status, WANDB_MODE="disabled", **environment)["cpu"]


def imports(rounds: int) -> float:
    """CPU seconds of a command that is refused before anything is read."""
    return statistics.median(
        pipeline(["stage=status", "status.nothing=1"], 1) for _ in range(rounds)
    )


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
        layers, width, counted = (4, 64, 4)
    else:
        layers, width, counted = (16, 192, 8)
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
    ways: dict[str, tuple[dict[str, Any], Any]] = {
        "bare": ({}, None),
        "full": ({}, None),
        "lora": ({"adapter": "lora"}, None),
        "partial, math": ({"method": "partial", "side": "math"}, cut),
        "partial, language": ({"method": "partial", "side": "language"}, cut),
        "simultaneous": ({"method": "simultaneous"}, cut),
    }

    class Clock(TrainerCallback):
        ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.process_time())

    def step(name: str) -> float:
        """Median CPU seconds of a step; the first two are not counted."""
        (knobs, partition), steps = ways[name], counted + 2
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
        given: dict[str, Any] = {"model": model, "args": args, "processing_class": make_tokenizer()}
        trainer: Any
        if name == "bare":
            trainer = SFTTrainer(train_dataset=rows, **given)
        else:
            trainer = Trainer(
                train_dataset=dict.fromkeys(parts, rows), sft=sft, parts=parts, **given
            )
        plan_steps(args, sft, steps)
        Clock.ends = []
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Clock())
        trainer.train()
        return statistics.median(
            end - begun for begun, end in zip(Clock.ends[1:], Clock.ends[2:], strict=False)
        )

    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(asked.rounds):
        for name in ways if number % 2 else reversed(ways):  # what comes first gains nothing by it
            found[name].append(step(name))
    medians = {name: statistics.median(each) for name, each in found.items()}
    for name in list(ways)[1:]:
        paired = [mine / bare for mine, bare in zip(found[name], found["bare"], strict=True)]
        more = {"ratios": [round(one, 3) for one in paired], "layers": layers, "width": width}
        yield row(
            f"1,000 steps of {name}",
            1e3 * medians[name],
            "SFTTrainer",
            1e3 * medians["bare"],
            **more,
        )


# --- merge ---

MERGES: dict[
    str, tuple[str, dict[str, Any]]
] = {  # outside parameters are math's where nothing is to be computed
    "swap": (
        "layer_swap",
        {"bottom_layers": 3, "embeddings": "math", "final_norm": "math", "head": "math"},
    ),
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
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(asked.rounds):
        for name in (
            "cp",
            *MERGES,
            *(f"mergekit {name}" for name in list(MERGES)[:3] if asked.mergekit),
        ):
            for place in ("out", "runs"):
                shutil.rmtree(folder / place, ignore_errors=True)
            for path in folder.glob("*/*.safetensors"):  # into the page cache
                path.read_bytes()
            os.sync()
            if name == "cp":
                made = command(["cp", "-r", str(folder / "math"), str(folder / "out")])
                mine = {"seconds": made["cpu"], "wall": made["wall"]}
            elif name.startswith("mergekit "):
                (folder / "merge.json").write_text(
                    json.dumps(for_mergekit(name.removeprefix("mergekit "), folder))
                )
                made = command(
                    [
                        asked.mergekit,
                        "-c",
                        MERGEKIT,
                        str(folder / "merge.json"),
                        str(folder / "out"),
                    ]
                )
                mine = json.loads(made["said"][0])
            else:
                made = command(
                    [sys.executable, "-c", ENGINE, str(Path(__file__).parent), name, str(folder)]
                )
                mine = json.loads(made["said"][0])
            found.setdefault(name, []).append(mine | {"anonymous_mb": made["anonymous_mb"]})

    def median(name: str, key: str) -> float:
        return statistics.median(one[key] for one in found[name])

    for name in MERGES:
        for peer in filter(found.__contains__, ("cp", f"mergekit {name}")):
            wall = round(median(name, "wall") / median(peer, "wall"), 2)
            more = {"wall_ratio": wall, "anonymous_mb": median(name, "anonymous_mb")}
            yield row(
                f"{name}, beside {peer}",
                median(name, "seconds"),
                peer,
                median(peer, "seconds"),
                **more,
            )


def make_checkpoints(
    folder: Path, width: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int
) -> None:
    """Write a base, and a math and a language expert 0.002 away from it.

    They have manifests of finished runs. The folders foreign_* have none.
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
                parameter.copy_(0.02 * noise if role == "base" else parameter + 0.002 * noise)
        model.save_pretrained(folder / role, max_shard_size="1GB")
        vocab = {
            "version": "1.0",
            "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
        }
        (folder / role / "tokenizer.json").write_text(json.dumps(vocab))
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
    time.sleep(3)  # files that were touched within two seconds are not trusted to be unchanged


def opened(name: str, folder: Path) -> Any:
    """Open a merge, which reads headers only."""
    from pipeline.merge.merge import open_merge
    from pipeline.merge.methods import METHODS
    from pipeline.models.checkpoint import Checkpoint

    method, knobs = MERGES[name]
    if method == "layer_swap":
        sides = ("math", "language")
    else:
        sides = ("0", "1")
    experts = {
        side: Checkpoint.open(folder / role)
        for side, role in zip(sides, ("math", "language"), strict=True)
    }
    if method == "layer_swap":
        named = {"math": "m", "language": "l"}
    else:
        named = {"experts": ["m", "l"]}
    base = None
    if method == "ties":
        base = Checkpoint.open(folder / "base")
    return open_merge(METHODS[method](**named, **knobs), experts, base)


def known_digests(merge: Any) -> dict[str, dict[str, str]]:
    """As finished runs have them on record."""
    from pipeline.merge import digests

    return digests.known_digests(merge, merge.layout.folder)


def one_merge(name: str, folder: Path) -> dict[str, float]:
    """Seconds of one merge in this process, without what importing takes."""
    import pipeline.merge.stage
    import pipeline.runs.tracking  # noqa: F401
    from pipeline.config.compose import compose
    from pipeline.launch.launchers import make_single_run

    foreign = name == list(MERGES)[-1]
    words = [
        "stage=merge",
        "merge=layer_swap",
        "merge.bottom_layers=3",
        "merge.top_layers=0",
        "threads=1",
        *(f"merge.{side}={folder}/foreign_{side}" for side in ("math", "language")),
        *(f"merge.{part}=math" for part in ("embeddings", "final_norm", "head")),
        f"runs_dir={folder}/runs",
        "tracking.mode=disabled",
    ]
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
    knobs = {"weight": 1.0} | ({"density": 0.2} if name.startswith("TIES") else {})
    each = {"models": [{"model": model, "parameters": knobs} for model in (math_, language)]}
    if name == "soup":
        return {"merge_method": "linear", "dtype": "bfloat16", **each}
    base = {"base_model": str(folder / "base"), "dtype": "float32", "out_dtype": "bfloat16"}
    return {"merge_method": "ties", **base, **each}


# --- evaluate ---


def evaluate(asked: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield a row per kind of request, answered by the harness' HFLM and by our engine."""
    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from pipeline.config.evaluation import Eval, EvalTask
    from pipeline.evaluate.model import open_model
    from pipeline.evaluate.prompts import harness_tamed, load_tasks
    from pipeline.evaluate.tasks import task_definitions
    from pipeline.hub.lock import Lock

    if not (asked.model and asked.data_root):
        raise SystemExit("bench.py evaluate needs --model FOLDER and --data_root FOLDER")
    torch.set_num_threads(1)

    def requests(task: EvalTask, language: str, tokens: int) -> list[Instance]:
        place = Path(tempfile.mkdtemp(dir=folder))
        with harness_tamed():
            settings = Eval("", [task], max_gen_toks=tokens)
            (loaded,) = load_tasks(
                task_definitions(settings, [language], asked.data_root, place), Lock()
            )
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
    engine = vllm_model(asked) if asked.vllm else None

    def seconds(lm: Any, kind: str, asks: list[Instance]) -> tuple[list[Any], float]:
        begun = clock()
        answers = getattr(lm, kind)(asks, disable_tqdm=True)
        return answers, clock() - begun

    for language in asked.languages:
        generated = requests(EvalTask("mgsm", 8), language, 16 if asked.small else 128)
        few = [request.args[0] for request in requests(EvalTask("mgsm", 5), language, 1)]
        letters = []
        for prompt in few:
            for letter in "ABCD":
                letters.append(Instance("loglikelihood", {}, (prompt, f" {letter}"), 0))
        sets = {
            "8-shot answers": ("generate_until", generated),
            "5-shot letters": ("loglikelihood", letters),
        }
        if (asked.data_root / "mgsm_steps" / language).is_dir():
            steps = requests(EvalTask("mgsm_steps", 4), language, 1)
            sets["choices of several tokens"] = ("loglikelihood", steps)
        for what, (kind, asks) in sets.items():
            theirs, peer = seconds(stock, kind, asks)
            for name, lm in {"ours": ours, **({"vLLM": engine} if engine else {})}.items():
                found, mine = seconds(lm, kind, asks)
                pairs = list(zip(found, theirs, strict=True))
                if kind == "generate_until":
                    more: Row = {"other_answers": sum(one != two for one, two in pairs)}
                else:
                    more = {"largest_difference": max(abs(one[0] - two[0]) for one, two in pairs)}
                yield row(
                    f"{what}, {language}, {name}", mine, "HFLM", peer, requests=len(asks), **more
                )
    if torch.cuda.is_available():
        return  # what a command takes to start is a matter of the CPU
    words = [
        "stage=eval",
        f"checkpoint={asked.model.resolve()}",
        "eval=mgsm_0shot",
        "languages=[en]",
        f"data_root={asked.data_root.resolve()}",
        "eval.limit=1",
        "eval.max_gen_toks=1",
        "threads=1",
    ]
    start = statistics.median(
        pipeline([*words, f"runs_dir={folder}/{n}"]) for n in range(asked.rounds)
    )
    libraries = [
        sys.executable,
        "-c",
        "import lm_eval.models.huggingface, lm_eval.evaluator, datasets",
    ]
    peer = statistics.median(command(libraries)["cpu"] for _ in range(asked.rounds))
    yield row("a command with one answer of one token", start, "imports of lm_eval", peer)


def vllm_model(asked: argparse.Namespace) -> Any:
    from pipeline.evaluate.model import Answering
    from pipeline.extras.vllm_backend import VllmBackend

    backend = VllmBackend(
        asked.batch_size, asked.dtype, asked.model, scratch=asked.model
    )  # a folder: nothing is written
    backend.load()
    return Answering(backend, pretrained=backend.model, tokenizer=backend.tokenizer)


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
    """CPU seconds of the job of SMALL's first training until its first step; its data are there."""
    runs_dir = folder / "step"
    table = [
        "stage=table",
        f"table={folder}/small.yaml",
        f"runs_dir={runs_dir}",
        "launcher=slurm",
        "launcher.gpus=0",
    ]
    pipeline(
        [*table, "launcher.workers=1", "launcher.dry_run=true"]
    )  # an array a level: else it is one job
    tasks = [
        json.loads(line)
        for line in (runs_dir / ".slurm-dry-run/plan.jsonl").read_text().splitlines()
    ]
    kinds = dict.fromkeys((task["level"], task["kind"]) for task in tasks)
    worker = [
        sys.executable,
        "-m",
        "pipeline.launch.worker",
        "task",
        str(runs_dir / ".slurm-dry-run"),
    ]
    training = next(task for task in tasks if task["stage"] == "sft")
    for level, kind in kinds:
        if level < training["level"]:
            command([*worker, str(level), kind])
    state = runs_dir / ".work" / training["hash"] / "state.json"
    process = subprocess.Popen(
        [*worker, str(training["level"]), training["kind"]], stderr=subprocess.DEVNULL
    )
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
    count = 20 if asked.small else 1000
    words = [
        "-m",
        "stage=sft",
        "expert=math",
        "model=sandbox",
        "recipe=sandbox_math",
        "threads=1",
        "launcher=slurm",
    ]
    words += [
        "launcher.gpus=0",
        f"seed={','.join(map(str, range(count)))}",
        f"runs_dir={folder}/submitted",
    ]
    seconds = pipeline(words, 75, PATH=f"{folder}:{os.environ['PATH']}")  # 75: all are in the queue
    yield row(f"submit {count:,} trainings", seconds, "imports", imports(asked.rounds))
    (folder / "small.yaml").write_text(SMALL)
    libraries = command([sys.executable, "-c", "from trl import SFTTrainer"])["cpu"]
    yield row(
        "a training's job to its first step", first_step(folder), "import of SFTTrainer", libraries
    )
    if not asked.slurm:
        return
    from cluster import two_nodes

    table = ["stage=table", f"table={folder}/small.yaml"]
    here = pipeline([*table, f"runs_dir={folder}/here", "launcher.workers=1"])
    counted = folder / "cpu"
    wrap = executable(folder / "counted", COUNTED.format(python=sys.executable, file=str(counted)))
    words = [
        *table,
        f"runs_dir={folder}/jobs",
        "launcher=slurm",
        "launcher.gpus=0",
        "launcher.memory=900M",
    ]
    words += [f"launcher.wrap={wrap}", 'launcher.options=["--exclusive","--nodelist=n1"]']
    with two_nodes() as cluster:
        submitting = pipeline(words, 75, **cluster.environment)
        cluster.idle(3600)
        pipeline(words, **cluster.environment)
    jobs = sum(map(float, counted.read_text().splitlines()))
    yield row("a small table as jobs", submitting + jobs, "the same by one worker here", here)


# --- plan, report ---


def plan(asked: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield the times of plans beside many finished runs.

    The runs have manifests like real ones, 14 KB each, with other names and hashes.
    """
    from importlib.resources import files

    text = Path(str(files("pipeline") / "data/sandbox_base/manifest.json")).read_text(
        encoding="utf-8"
    )
    shipped = json.loads(text)
    runs_dir, tables = folder / "runs", folder / "conf/tables"
    for number in range(100 if asked.small else 10_000):
        digits = f"{number:08x}{0:056x}"  # a folder is named by the first twelve
        run = runs_dir / f"other-{number}-{digits[:12]}"
        run.mkdir(parents=True)
        (run / "manifest.json").write_text(
            text.replace(shipped["hash"], digits).replace(shipped["name"], run.name)
        )
    tables.mkdir(parents=True)
    zones = {}
    for bottom in range(3):
        for top in range(3):
            zones[f"{bottom}+{top}"] = {"bottom": bottom, "top": top}
    (tables / "all.yaml").write_text(
        json.dumps({"name": "all", "defaults": ["layer_swapping_table1"], "axes": {"t": zones}})
    )
    peer = imports(asked.rounds)
    commands = {
        "plan of layer_swapping_table1 with all 81 configurations": ["stage=plan", "table=all"]
    }
    commands |= {
        f"plan of {name}": ["stage=plan", f"table={name}"]
        for name in ("unreasonable_table3", "sandbox_full")
    }
    for name, words in (commands | {"status": ["stage=status"]}).items():
        words = [*words, f"runs_dir={runs_dir}", f"--config-dir={folder / 'conf'}"]
        yield row(
            name, statistics.median(pipeline(words) for _ in range(asked.rounds)), "imports", peer
        )


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

    They have 24 models, three languages, and 100 answers each, of which the page shows 10,000.
    """
    from made_up_runs import finish

    from pipeline.config.compose import compose
    from pipeline.runs.graph import order_runs
    from pipeline.tables.planned_runs import Planning

    (folder / "many.yaml").write_text(
        MANY.replace("SEEDS", str(list(range(1 if asked.small else 15))))
    )
    words = [f"table={folder}/many.yaml", f"runs_dir={folder}/runs"]
    planning = Planning.of(compose(["stage=report", *words]))  # type: ignore[arg-type]
    finish(order_runs(planning.targets()))
    peer, page = imports(asked.rounds), folder / "runs/reports/many/index.html"
    commands: dict[str, Callable[[], list[str]]] = {
        "stage=report": lambda: ["stage=report", *words],
        "stage=export": lambda: ["stage=export", *words, f"export.to={folder}/many.zip"],
    }
    for name, asks in commands.items():
        made = [command([sys.executable, "-m", "pipeline", *asks()]) for _ in range(asked.rounds)]
        results = len((page.parent / "results.csv").read_text(encoding="utf-8").splitlines()) - 1
        more = {"results": results, "anonymous_mb": max(one["anonymous_mb"] for one in made)}
        yield row(name, statistics.median(one["cpu"] for one in made), "imports", peer, **more)
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
        medians = {
            f"{name}_ms": round(statistics.median(one[name] for one in timings))
            for name in timings[0]
        }
        return {"chromium": driver.capabilities["browserVersion"], **medians}
    finally:
        driver.quit()


if __name__ == "__main__":
    sys.exit(main())
