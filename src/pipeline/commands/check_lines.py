"""The lines of stage=check: commands in processes of their own, and what is right of the runs that they compute."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.commands.check_inputs import QUESTIONS, fields_of, here, write_base, write_rows
from pipeline.commands.check_processes import Wrong, last_lines, run_command
from pipeline.config.compose import compose
from pipeline.config.defaults import card_of
from pipeline.config.overrides import chosen_options
from pipeline.config.stages import CheckStage, TrainStage
from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.estimate import cpu
from pipeline.estimate.durations import driver_version, visible_gpus
from pipeline.estimate.flops import Gpu, cards
from pipeline.estimate.gpu_budget import memory_of, training_work, written_bytes
from pipeline.files import cores
from pipeline.launch.in_process import reason_of
from pipeline.models.shape import shape_in, shape_of
from pipeline.progress import say
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.run import Run
from pipeline.stages.rows import build_single
from pipeline.train.memory import CONTEXT, WIDTH, full_model, micro_batches, trained_parameters

EXAMPLE = ("stage=sft", "expert=math")  # what the command's words are taken to be a command of
STEPS, ANSWER = 3, 64  # optimizer steps of a method; tokens of an answer
LIMIT, MORE = 300.0, 3e-7  # seconds after which a line is ended, and as many more for each parameter
OF_THE_BASE = re.compile(r"\+?model(\.(path|init|revision|architecture.*|tokenizer|vocab_size))?")
MOSTLY_FREE = 0.95  # of a device's memory, below which another process is using it
TRIES = 3  # to kill a training between its first resume point and its end
PARTED, ALONE = ("partial", "simultaneous"), ("full", "partial", "lora")  # with a partition; on rows of one side


@dataclass
class Line:
    """One line of the check. state: ok, wrong or left out; text: what was found, or why; numbers: for the record."""

    name: str
    state: str
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)


Found = tuple[str, dict[str, Any]]  # the text of a line that is ok, and its numbers


class LeftOut(PipelineError):
    """The line that is being checked cannot be tried; the message says why."""


class Checking:
    """The commands of a check, and what their lines found so far.

    typed: key -> value of the user's words for trainings and evaluation. folder: where everything is written, emptied
    at both ends.

    Raises:
        PipelineError: a word of any of the commands is wrong.
    """

    def __init__(self, config: CheckStage, overrides: Sequence[str], folder: Path) -> None:
        self.typed = {override.partition("=")[0]: override.partition("=")[2] for override in overrides}
        self.folder, self.data, self.base = folder, folder / "data", folder / "base"
        self.methods = list(config.check.methods)
        self.ranks: list[dict[str, Any]] = []  # facts of each process's device
        self.made: dict[str, Manifest] = {}  # method -> its finished run
        self.kept: dict[str, Path] = {}  # math, language: the first expert of this side; merge: what was made of them
        plain = [override for override in overrides if not override.startswith(("eval.", "partition"))]
        composed = compose([*EXAMPLE, *plain])
        assert isinstance(composed, TrainStage)
        self.recipe = chosen_options([*EXAMPLE, *plain]).get("recipe", "default")
        self.model, self.sft, self.threads = composed.model, composed.sft, composed.threads
        by_slurm = config.launcher.name == "slurm"
        self.on_gpu = config.launcher.gpus != 0 if by_slurm else bool(driver_version() and visible_gpus())
        self.local = here(self.model, config.runs_path)
        self.shape = shape_in(self.local) if self.local else shape_of(fields_of(self.model))
        trainings = {method: compose(self.training(method)) for method in self.methods}
        self.recipes = {method: training.sft for method, training in trainings.items()}  # type: ignore[attr-defined]
        compose(self.evaluation(self.base))
        micro_batches(self.sft)

    def training(self, method: str, **changed: Any) -> list[str]:
        """The words of a method's training. Methods of one set take the math and the language rows in turn."""
        kind, alone = method.partition("_")[0], [name for name in self.methods if name.partition("_")[0] in ALONE]
        joint = method not in alone
        keys = {
            "stage": "sft", "sft": method, "expert": "math_qac" if joint else ("math", "qac")[alone.index(method) % 2],
            "data.size": (1 + joint) * STEPS * self.sft.batch_size, "sft.steps": STEPS, "sft.warmup_steps": 0,
            "model": self.local or self.base, "recipe": self.recipe, **self.everywhere(),
            **({"partition": "B", "partition.scale_to_depth": "true"} if kind in PARTED else {}),
        }  # fmt: skip
        for key, value in self.typed.items():
            is_unread = key.startswith("eval.") or (key.startswith("partition") and kind not in PARTED)
            keys |= {} if is_unread or OF_THE_BASE.fullmatch(key) else {key: value}
        return words_of(keys | changed)

    def evaluation(self, checkpoint: Path) -> list[str]:
        keys = {"stage": "eval", "eval": "mgsm_2shot", "languages": "[en]", "checkpoint": checkpoint}
        keys |= {"eval.limit": QUESTIONS, "eval.max_gen_toks": ANSWER, **self.everywhere()}
        read = {key: value for key, value in self.typed.items() if key.startswith(("eval.", "threads", "seed"))}
        return words_of(keys | read)

    def everywhere(self) -> dict[str, Any]:
        return {"data_root": self.data, "runs_dir": self.folder / "runs", "tracking.mode": "disabled"}

    def disk(self) -> float:
        """Most bytes at a time: the base, two experts, and the killed training with two points or the merge."""
        count, every, files = self.shape.parameters, full_model(self.shape), []
        for recipe in self.recipes.values():
            trained = trained_parameters(self.shape, every, recipe.adapter_rank)
            files.append(written_bytes(recipe, count, trained, snapshots=0, points=2))
        base = 0 if self.local else WIDTH["bfloat16"] * count
        return base + 3 * max(sizes["weights"] for sizes in files) + files[0]["resume points"]

    def machine(self) -> Gpu:
        """The rates that plans assume of this device; of an unknown GPU those of an A100."""
        name = self.ranks[0]["name"] if self.ranks else ""
        listed = next((gpu for key, gpu in cards().items() if key.partition("_")[0].upper() in name), None)
        return listed or (cards()["a100_80"] if self.on_gpu else cpu.cpu(self.shape, self.threads or cores()))

    # ------------------------------------------------------------------------------------------------ the lines

    def run(self) -> list[Line]:
        """All lines; one that is wrong leaves out those that need it."""
        self.clear()
        todo: list[tuple[str, str, Callable[[], Found]]] = [
            ("devices", "", self.check_devices),
            ("base", "devices", self.make_base),
            *((method, "base", partial(self.check_method, method)) for method in self.methods),
            ("resume", self.methods[0], self.check_resume),
            ("merge", "", self.check_merge),
            ("questions", "base", self.check_questions),
        ]
        lines: dict[str, Line] = {}
        try:
            for name, needed, work in todo:
                say(f"stage=check: {name}")
                try:
                    if needed and (state := lines[needed].state) != "ok":
                        raise LeftOut(f"{needed} is {state}")
                    lines[name] = Line(name, "ok", *work())
                except LeftOut as error:
                    lines[name] = Line(name, "left out", str(error))
                except Exception as error:
                    log = {"log": last_lines(self.folder / f"{name}.log")}
                    lines[name] = Line(name, "wrong", reason_of(error), log)
                say(f"  {lines[name].state}: {lines[name].text}")
        finally:
            self.clear()
        return list(lines.values())

    def clear(self) -> None:
        """Delete everything but the logs; a check that was killed leaves its weights to the next one."""
        for folder in ("runs", "again", "base", "data"):
            shutil.rmtree(self.folder / folder, ignore_errors=True)

    def command(self, name: str, words: Sequence[str], **how: Any) -> str | None:
        """As run_command, for a line."""
        return run_command(self.folder / f"{name}.log", words, LIMIT + MORE * self.shape.parameters, **how)

    def made_by(self, name: str, words: Sequence[str]) -> tuple[Path, Manifest]:
        """The run that a command computes."""
        folder = Path(str(self.command(name, words)).strip().splitlines()[-1])
        manifest = read_manifest(folder)
        assert manifest is not None
        return folder, manifest

    def check_devices(self) -> Found:
        write_rows(self.data, STEPS * self.sft.batch_size, self.sft.seq_length)
        overrides = [override for override in self.training(self.methods[0]) if not override.startswith("model")]
        code = ("-c", "from pipeline.commands.check_processes import probe_main; probe_main()")
        facts = json.loads(str(self.command("devices", [*overrides, "model=small_bpe"], code=code)))
        self.ranks, self.on_gpu, hardware = facts["ranks"], bool(facts["cuda"]), self.typed.get("hardware")
        if card_of(hardware) and not self.on_gpu:
            raise Wrong(
                f"hardware={hardware} has GPUs, and torch sees none here: check a node with GPUs, or hardware=cpu"
            )
        check_sum(facts)
        count, names = len(self.ranks), ", ".join(dict.fromkeys(rank["name"] for rank in self.ranks))
        parts = [f"{count} processes on {names}, sum by {facts['backend']}" if count > 1 else f"1 process on {names}"]
        parts[0] += f", {rate:.1f} GB/s" if (rate := facts["gigabytes_a_second"]) else ""
        parts += [f"driver {driver_version()}, CUDA {facts['cuda']}"] if facts["cuda"] and driver_version() else []
        used = [rank for rank in self.ranks if rank["free"] < MOSTLY_FREE * rank["memory"]]
        parts += [f"{rank['free'] / 1e9:.1f} of {rank['memory'] / 1e9:.1f} GB free" for rank in used[:1]]
        return "; ".join(parts), facts

    def make_base(self) -> Found:
        if self.local:
            return f"model={self.model.name} is on this disk", {"random": False}
        begun = time.perf_counter()
        write_base(self.base, fields_of(self.model), self.data)
        size, seconds = size_of(self.base), round(time.perf_counter() - begun, 1)
        text = f"random weights at the shape of {self.model.name}, {size / 1e9:.2f} GB"
        return text, {"random": True, "bytes": size, "seconds": seconds}

    def check_method(self, method: str) -> Found:
        """Dtypes as in the recipe; tokens a second and memory next to the plan's, with rows of sft.seq_length."""
        run: Run[TrainStage] = build_single(self.training(method))
        sft, length, room = run.config.sft, float(run.config.sft.seq_length), min(r["memory"] for r in self.ranks)
        if (needed := memory_of(run, self.on_gpu, length, room)) > room:
            raise LeftOut(
                f"its plan is {needed / 1e9:.1f} GB for each process, and there are {room / 1e9:.1f}: "
                "see stage=plan for knobs that fit"
            )
        folder, manifest = self.made_by(method, self.training(method))
        side, facts = manifest.config["expert"]["side"], manifest.facts
        if side == "both" or side in self.kept:
            shutil.rmtree(folder)
        else:
            self.kept[side] = folder
        self.made[method] = manifest
        check_dtypes(manifest, sft)
        needed -= CONTEXT if self.on_gpu else 0
        _, seconds = training_work(run, self.machine(), 2 * STEPS, length)
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
        """The first method again, killed after its first resume point, and resumed: with the same bits. On a GPU they
        are those of another training, with deterministic kernels: the first one is timed without."""
        method, again = self.methods[0], self.folder / "again"
        fixed = {"runs_dir": again, "deterministic": str(self.on_gpu).lower()}
        uninterrupted = self.made_by("resume", self.training(method, **fixed))[1] if self.on_gpu else self.made[method]
        overrides = {resume: self.training(method, **fixed, **{"sft.resume_minutes": resume}) for resume in (0, "null")}
        for _ in range(TRIES):
            shutil.rmtree(again, ignore_errors=True)
            if self.command("resume", overrides[0], until=lambda: any(again.glob(".work/*/*/resume.json"))) is None:
                _, resumed = self.made_by("resume", overrides["null"])
                shutil.rmtree(again, ignore_errors=True)
                return same_bits(uninterrupted, resumed)
        raise LeftOut(f"{TRIES} times the training ended before it could be killed")

    def check_merge(self) -> Found:
        if not {"math", "language"} <= self.kept.keys():
            raise LeftOut("it needs a math and a language expert: two of full, partial and lora in check.methods")
        keys = {"stage": "merge", "merge": "layer_swap", "merge.bottom_layers": 1, "merge.top_layers": 1}
        keys |= {f"merge.{side}": folder for side, folder in self.kept.items()} | self.everywhere()
        del keys["data_root"]
        self.kept["merge"], manifest = self.made_by("merge", words_of(keys))
        size = size_of(self.kept["merge"])
        text = f"layer swap, {size / 1e9:.2f} GB in {manifest.seconds:.1f} s"
        return text, {"bytes": size, **seconds_of(manifest)}

    def check_questions(self) -> Found:
        name = "merge" if "merge" in self.kept else "base"
        _, manifest = self.made_by("questions", self.evaluation(self.kept.get("merge") or self.local or self.base))
        backend, seconds = self.typed.get("eval.backend", "hf"), manifest.seconds
        text = f"{QUESTIONS} of the {name} by eval.backend={backend} in {seconds:.1f} s, loading included"
        return text, {"questions_a_second": round(QUESTIONS / seconds, 3), **seconds_of(manifest)}


def words_of(keys: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in keys.items()]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


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
        sharing = [str(rank_beside["rank"]) for rank_beside in ranks if rank_beside["uuid"] == rank["uuid"]]
        if facts["cuda"] and len(sharing) > 1:
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
    return {"seconds": manifest.seconds, "predicted_seconds": manifest.cost["predicted_seconds"]}
