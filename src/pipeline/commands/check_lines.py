"""The lines of stage=check: commands in processes of their own, and what is right of the runs that they compute."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.commands.check_inputs import QUESTIONS, fields_of, here, write_base, write_rows
from pipeline.commands.check_processes import (
    Wrong,
    finished,
    kill_after_resume_point,
    last_lines,
    started,
)
from pipeline.config.compose import compose
from pipeline.config.defaults import read_hardware
from pipeline.config.overrides import chosen_options
from pipeline.config.stages import CheckStage, TrainStage
from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.estimate import cpu
from pipeline.estimate.durations import cores, driver_version, visible_gpus
from pipeline.estimate.flops import GPUS, Gpu, training_seconds
from pipeline.estimate.gpu_budget import seconds_of_parts, trained_parts, written_bytes
from pipeline.launch.in_process import reason_of
from pipeline.launch.slurm_tasks import write_speed
from pipeline.models.shape import shape_in, shape_of
from pipeline.progress import say
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.run import Run
from pipeline.stages.rows import build_single
from pipeline.train.memory import WIDTH, full_model, micro_batches, trained_parameters, training_memory

EXAMPLE = ("stage=sft", "expert=math")  # what the command's words are taken to be a command of
STEPS, ANSWER = 3, 64  # optimizer steps of a method; tokens of an answer
START = {True: 40.0, False: 15.0}  # seconds until a process computes: libraries, the context of a GPU
SLOWEST, LEAST = 10, 300.0  # a line is ended after so many times its estimate, and not before so many seconds
NOT_OF_TRAININGS = re.compile(r"\+?(model(\.(path|init|revision|architecture.*|tokenizer|vocab_size))?|eval\..*)=")
MOSTLY_FREE = 0.95  # of a device's memory, below which another process is using it
Found = tuple[str, dict[str, Any]]  # the text of a line, and its numbers
TRIES = 3  # to kill a training between its first resume point and its end


@dataclass
class Line:
    """One line of the check. state: ok, wrong or left out; text: what was found, or why; numbers: for the record."""

    name: str
    state: str
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)


class LeftOut(PipelineError):
    """The line that is being checked cannot be tried; the message says why."""


class Checking:
    """The commands of a check, and what their lines found so far.

    words: of the user, for trainings and evaluation. folder: where everything is written, emptied at both ends.
    """

    def __init__(self, config: CheckStage, words: Sequence[str], folder: Path) -> None:
        self.words, self.folder, self.methods = list(words), folder, list(config.check.methods)
        self.data, self.base = folder / "data", folder / "base"
        self.devices: dict[str, Any] = {}
        self.made: dict[str, Manifest] = {}  # method -> its finished run
        self.kept: dict[str, Path] = {}  # math, language: the first expert of this side; merge: what was made of them
        self.given = {word.lstrip("+").partition("=")[0]: word for word in self.words}
        original = [word for word in self.words if not word.startswith(("eval.", "partition"))]
        composed = compose([*EXAMPLE, *original])
        assert isinstance(composed, TrainStage)
        self.recipe = chosen_options([*EXAMPLE, *original]).get("recipe", "default")
        self.model, self.sft, self.threads = composed.model, composed.sft, composed.threads
        by_slurm = config.launcher.name == "slurm"
        self.on_gpu = config.launcher.gpus != 0 if by_slurm else bool(driver_version() and visible_gpus())
        self.local = here(self.model, Path(config.runs_dir))
        self.shape = shape_in(self.local) if self.local else shape_of(fields_of(self.model))

    def training(self, method: str, runs_dir: Path | None = None, **knobs: Any) -> list[str]:
        """The words of a method's training. Methods of one set take the math and the language rows in turn."""
        single = [name for name in self.methods if name.partition("_")[0] in ("full", "partial", "lora")]
        joint = method not in single
        expert = "math_qac" if joint else ("math", "qac")[single.index(method) % 2]
        rows = (2 if joint else 1) * STEPS * self.sft.batch_size
        first = method == self.methods[0]
        words = [
            *("stage=sft", f"sft={method}", f"expert={expert}", f"data.size={rows}", f"data_root={self.data}"),
            *(f"runs_dir={runs_dir or self.folder / 'runs'}", "tracking.mode=disabled"),
            *(f"sft.steps={STEPS}", "sft.warmup_steps=0"),
            f"deterministic={first}".lower(),
            *(f"{key}={value}" for key, value in knobs.items()),
        ]
        own = [word for word in self.words if not NOT_OF_TRAININGS.match(word)]
        words += [f"model={self.local or self.base}", *([] if "recipe" in self.given else [f"recipe={self.recipe}"])]
        if method.partition("_")[0] in ("partial", "simultaneous"):
            own += [] if "partition" in self.given else ["partition=B"]
            own += [] if "partition.scale_to_depth" in self.given else ["partition.scale_to_depth=true"]
        else:
            own = [word for word in own if not word.startswith("partition")]
        return [*words, *own]

    def evaluation(self, checkpoint: Path) -> list[str]:
        own = [word for word in self.words if word.startswith(("eval.", "threads", "seed"))]
        own += [] if "eval.max_gen_toks" in self.given else [f"eval.max_gen_toks={ANSWER}"]
        words = ["stage=eval", "eval=mgsm_2shot", f"eval.limit={QUESTIONS}", "languages=[en]", f"data_root={self.data}"]
        return [*words, f"checkpoint={checkpoint}", f"runs_dir={self.folder / 'runs'}", "tracking.mode=disabled", *own]

    def compose_all(self) -> None:
        """Raise PipelineError for a wrong word of any command, before the first."""
        for method in self.methods:
            compose(self.training(method))
        compose(self.evaluation(self.base))
        micro_batches(self.sft)

    # ------------------------------------------------------------------------------------------------ the estimate

    def written(self, method: str) -> dict[str, int]:
        adapter = "lora" in method
        sft = replace(self.sft, adapter="lora" if adapter else "none")
        trained = trained_parameters(self.shape, full_model(self.shape), self.sft.lora_rank if adapter else 0)
        return written_bytes(sft, self.shape.parameters, trained, snapshots=0, points=1)

    def estimate(self) -> dict[str, float]:
        """Line -> seconds: starts of processes, bytes at the speed of this disk, and steps at the plan's rate."""
        start, rate, machine = START[self.on_gpu], write_speed(self.folder.parent), self.machine()
        base = WIDTH["bfloat16"] * self.shape.parameters
        read = (base if not self.local else 4 * self.shape.parameters) / rate
        rows, gpus = STEPS * self.sft.batch_size, self.sft.processes if self.on_gpu else 1
        full = replace(self.sft, adapter="none")
        steps = training_seconds(self.shape, full_model(self.shape), rows, full.seq_length, full, machine, gpus)
        seconds = {"devices": start, "base": 1.0 if self.local else 5 + base / rate}
        for method in self.methods:
            saved = self.written(method)["weights"] / rate
            seconds[method] = start + read + steps + saved
        first = self.written(self.methods[0])
        seconds["resume"] = 2 * (start + read) + steps + (first["weights"] + 2 * first["resume points"]) / rate
        seconds["merge"] = 5 + 3 * first["weights"] / rate
        seconds["questions"] = start + first["weights"] / rate + ANSWER * self.shape.layers * 1e-3
        return seconds

    def disk(self) -> float:
        """Most bytes at a time: the base, two experts, and either the killed training with two points or the merge."""
        base = 0 if self.local else WIDTH["bfloat16"] * self.shape.parameters
        weights = max(self.written(method)["weights"] for method in self.methods)
        return base + 3 * weights + 2 * self.written(self.methods[0])["resume points"]

    def machine(self) -> Gpu:
        """The rates that plans assume of this device; of an unknown GPU those of an A100."""
        name = next((rank["name"] for rank in self.devices.get("ranks", ())), "")
        listed = next((gpu for key, gpu in GPUS.items() if key.partition("_")[0].upper() in name), None)
        return listed or (GPUS["a100_80"] if self.on_gpu else cpu.cpu(self.shape, self.threads or cores()))

    # ------------------------------------------------------------------------------------------------ the lines

    def run(self) -> list[Line]:
        """All lines; one that is wrong leaves out those that need it."""
        lines: list[Line] = []
        self.clear()
        todo: list[tuple[str, tuple[str, ...], Callable[[], Found]]] = [
            ("devices", (), self.check_devices),
            ("base", ("devices",), self.make_base),
            *((method, ("base",), partial(self.check_method, method)) for method in self.methods),
            ("resume", (self.methods[0],), self.check_resume),
            ("merge", (), self.check_merge),
            ("questions", ("base",), self.check_questions),
        ]
        try:
            for name, needs, work in todo:
                states = {line.name: line.state for line in lines}
                missing = next((need for need in needs if states[need] != "ok"), None)
                say(f"stage=check: {name}")
                try:
                    if missing:
                        raise LeftOut(f"{missing} is {states[missing]}")
                    line = Line(name, "ok", *work())
                except LeftOut as error:
                    line = Line(name, "left out", str(error))
                except Exception as error:
                    line = Line(name, "wrong", reason_of(error), {"log": last_lines(self.folder / f"{name}.log")})
                say(f"  {line.state}: {line.text}")
                lines.append(line)
        finally:
            self.clear()
        return lines

    def clear(self) -> None:
        """Delete everything but the logs; a check that was killed leaves its weights to the next one."""
        for place in ("runs", "again", "base", "data"):
            shutil.rmtree(self.folder / place, ignore_errors=True)

    def command(self, name: str, words: Sequence[str], code: Sequence[str] = ("-m", "pipeline")) -> str:
        """Standard output of a command in a process of its own. Raises Wrong with its error, or for one that hangs."""
        with started(self.folder / f"{name}.log", words, code) as process:
            return finished(process, self.folder / f"{name}.log", self.limit(name))

    def made_by(self, name: str, words: Sequence[str]) -> tuple[Path, Manifest]:
        """The run that a command computes."""
        folder = Path(self.command(name, words).strip().splitlines()[-1])
        manifest = read_manifest(folder)
        assert manifest is not None
        return folder, manifest

    def limit(self, name: str) -> float:
        """Seconds after which a command counts as one that hangs."""
        return max(LEAST, SLOWEST * self.estimate().get(name, 0.0))

    def check_devices(self) -> Found:
        self.data.mkdir(parents=True, exist_ok=True)
        write_rows(self.data, STEPS * self.sft.batch_size, self.sft.seq_length)
        words = [word for word in self.training(self.methods[0]) if not word.startswith("model")]
        code = ("-c", "from pipeline.commands.check_processes import probe_main; probe_main()")
        self.devices = facts = json.loads(self.command("devices", [*words, "model=small_bpe"], code))
        ranks, count = facts["ranks"], self.sft.processes
        hardware = self.given.get("hardware", "").partition("=")[2]
        if hardware and "plan.gpu" in read_hardware(hardware) and not facts["cuda"]:
            raise Wrong(
                f"hardware={hardware} has GPUs, and torch sees none here: check a node with GPUs, or hardware=cpu"
            )
        check_sum(facts)
        rate = f", {facts['gigabytes_a_second']:.1f} GB/s" if facts.get("gigabytes_a_second") else ""
        driver = f"; driver {driver_version()}, CUDA {facts['cuda']}" if facts["cuda"] and driver_version() else ""
        named = ", ".join(dict.fromkeys(rank["name"] for rank in ranks))
        head = f"{count} processes on {named}, sum by {facts['backend']}" if count > 1 else f"1 process on {named}"
        taken = next((rank for rank in ranks if rank["free"] < MOSTLY_FREE * rank["memory"]), None)
        others = f"; {taken['free'] / 1e9:.1f} of {taken['memory'] / 1e9:.1f} GB free" if taken else ""
        return f"{head}{rate}{driver}{others}", facts

    def make_base(self) -> Found:
        if self.local:
            return f"model={self.model.name} is on this disk", {"random": False}
        begun = time.perf_counter()
        write_base(self.base, fields_of(self.model), self.data)
        size = sum(path.stat().st_size for path in self.base.glob("*.safetensors"))
        return (
            f"random weights at the shape of {self.model.name}, {size / 1e9:.2f} GB",
            {"random": True, "bytes": size, "seconds": round(time.perf_counter() - begun, 1)},
        )

    def check_method(self, method: str) -> Found:
        words = self.training(method)
        run = build_single(words)
        assert isinstance(run.config, TrainStage)
        parts, room = self.planned_memory(run), min(rank["memory"] for rank in self.devices["ranks"])
        if (needed := sum(parts.values())) > room:
            raise LeftOut(
                f"its plan is {needed / 1e9:.1f} GB for each process, and there are {room / 1e9:.1f}: "
                "see stage=plan for knobs that fit"
            )
        folder, manifest = self.made_by(method, words)
        side = manifest.config["expert"]["side"]
        if side == "both" or side in self.kept:
            shutil.rmtree(folder)
        else:
            self.kept[side] = folder
        self.made[method] = manifest
        check_dtypes(manifest, run.config.sft)
        return self.compared(run, manifest, parts)

    def planned_memory(self, run: Run[TrainStage]) -> dict[str, float]:
        """Purpose -> bytes a process, with rows of sft.seq_length."""
        sft = run.config.sft
        parts = [part for _, part in trained_parts(run, self.shape)]
        return training_memory(self.shape, parts, sft.seq_length, sft, self.devices["cuda"])

    def compared(self, run: Run[TrainStage], manifest: Manifest, parts: dict[str, float]) -> Found:
        """Tokens a second and memory next to the plan's."""
        sft, facts = run.config.sft, manifest.facts
        gpus = sft.processes if self.devices["cuda"] else 1
        needed = sum(parts.values()) - (parts["context"] if self.devices["cuda"] else 0)
        length = float(sft.seq_length)
        seconds = seconds_of_parts(run, self.shape, 2 * STEPS, lambda _: length, self.machine(), gpus)
        planned = 2 * STEPS * sft.batch_size * length / seconds
        numbers = {
            "tokens_a_second": facts["step_tokens_per_second"], "planned_tokens_a_second": round(planned, 1),
            "planned_bytes": round(needed), "bytes": facts["process_peak_bytes"], "dtypes": facts["dtypes"],
            "loss": facts["loss"], **seconds_of(manifest),
        }  # fmt: skip
        dtypes = ", ".join(f"{kind} {'/'.join(names)}" for kind, names in facts["dtypes"].items())
        text = (
            f"{STEPS} steps, {numbers['tokens_a_second']:,.0f} tokens/s (plan {planned:,.0f}); "
            f"{numbers['bytes'] / 1e9:.1f} GB (plan {needed / 1e9:.1f}); {dtypes}"
        )
        return text, numbers

    def check_resume(self) -> Found:
        """The first method again, killed after its first resume point, and resumed: with the same bits."""
        method, again, log = self.methods[0], self.folder / "again", self.folder / "resume.log"
        for _ in range(TRIES):
            shutil.rmtree(again, ignore_errors=True)
            with started(log, self.training(method, again, **{"sft.resume_minutes": 0})) as process:
                if killed := kill_after_resume_point(process, again, self.limit("resume")):
                    break
                finished(process, log, self.limit("resume"))
        if not killed:
            raise LeftOut(f"{TRIES} times the training ended before it could be killed")
        _, resumed = self.made_by("resume", self.training(method, again, **{"sft.resume_minutes": "null"}))
        shutil.rmtree(again, ignore_errors=True)
        return same_bits(self.made[method], resumed)

    def check_merge(self) -> Found:
        if not {"math", "language"} <= self.kept.keys():
            raise LeftOut("it needs a math and a language expert: two of full, partial and lora in check.methods")
        experts = [f"merge.{side}={folder}" for side, folder in self.kept.items()]
        words = ["stage=merge", "merge=layer_swap", *experts, "merge.bottom_layers=1", "merge.top_layers=1"]
        words += [f"runs_dir={self.folder / 'runs'}", "tracking.mode=disabled"]
        self.kept["merge"], manifest = self.made_by("merge", words)
        size = sum(path.stat().st_size for path in self.kept["merge"].glob("*.safetensors"))
        text = f"layer swap, {size / 1e9:.2f} GB in {manifest.seconds:.1f} s"
        return text, {"bytes": size, **seconds_of(manifest)}

    def check_questions(self) -> Found:
        name = "merge" if "merge" in self.kept else "base"
        words = self.evaluation(self.kept.get("merge") or self.local or self.base)
        _, manifest = self.made_by("questions", words)
        backend = self.given.get("eval.backend", "eval.backend=hf")
        text = f"{QUESTIONS} of the {name} by {backend} in {manifest.seconds:.1f} s, loading included"
        return text, {"questions_a_second": round(QUESTIONS / manifest.seconds, 3), **seconds_of(manifest)}


# ---------------------------------------------------------------------------------------------------- what is right


def check_sum(facts: dict[str, Any]) -> None:
    """Raise Wrong unless every process has the sum over all of them, on a device of its own."""
    ranks = facts["ranks"]
    expected = len(ranks) * (len(ranks) + 1) / 2
    for rank in ranks:
        if rank["sum"] != [expected, expected]:
            raise Wrong(
                f"process {rank['rank']} got {rank['sum']} as the sum over {len(ranks)} processes by "
                f"{facts['backend']}, not {expected}: they do not reach one another correctly; NCCL_DEBUG=INFO prints "
                "how they try"
            )
    devices = [rank["uuid"] for rank in ranks]
    if facts["cuda"] and (shared := next((device for device in devices if devices.count(device) > 1), None)):
        sharing = [str(rank["rank"]) for rank in ranks if rank["uuid"] == shared]
        raise Wrong(f"processes {' and '.join(sharing)} are on one GPU: give each its own, or lower sft.processes")


def check_dtypes(manifest: Manifest, sft: Sft) -> None:
    """Raise Wrong unless what was trained, and its moments, have the dtypes of the recipe."""
    weights = "float32" if sft.adapter == "lora" else sft.weights
    moments = {"adamw": weights, "adamw_8bit": "OptimState8bit"}[sft.optimizer]
    stored = manifest.facts["dtypes"]
    if stored["weights"] != [weights]:
        raise Wrong(
            f"trained weights are {', '.join(stored['weights'])}, and sft.weights={sft.weights} gives {weights}"
        )
    if moments not in stored["moments"] or (moments == weights and stored["moments"] != [moments]):
        raise Wrong(f"moments are {', '.join(stored['moments'])}, and sft.optimizer={sft.optimizer} gives {moments}")


def same_bits(whole: Manifest, resumed: Manifest) -> Found:
    """Raise Wrong unless a training that was killed ended as the one that was not."""
    steps = [entry["step"] for entry in resumed.facts.get("resumed", ())]
    if not steps:
        raise Wrong("the killed training started over: its resume point was not used")
    digests, digests_again = whole.weights["digests"], resumed.weights["digests"]
    if different := [name for name in digests if digests[name] != digests_again.get(name)]:
        raise Wrong(
            f"{len(different)} of {len(digests)} tensors differ from those of the training that was not killed, the "
            f"first {different[0]}: resumed after step {steps[0]} with deterministic=true, they should be the same bits"
        )
    count = len(digests)
    return f"killed, resumed after step {steps[0]}: the same bits in {count} tensors", {"tensors": count}


def seconds_of(manifest: Manifest) -> dict[str, Any]:
    return {"seconds": manifest.seconds, "guessed_seconds": manifest.cost["guessed_seconds"]}
