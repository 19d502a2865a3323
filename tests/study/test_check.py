"""stage=check: whole on the CPU, and each failure that it names."""

import getpass
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
from fixture_types import Call, Patch

from pipeline.commands import check, check_lines, check_processes
from pipeline.commands.check_inputs import write_base, write_rows
from pipeline.config.compose import compose
from pipeline.config.stages import TrainStage
from pipeline.estimate import durations
from pipeline.launch.in_process import error_sentence
from pipeline.models.shape import SHAPES
from pipeline.runs.manifest import Manifest

SMALL = ["model=small_bpe", "sft.seq_length=48", "sft.batch_size=4", "sft.precision=fp32", "threads=1"]
TWO = ["hardware=cpu", "sft.processes=2", *SMALL]


Checked = Callable[..., dict[str, str]]  # words of a check -> the state and text of its lines


def lines_of(runs_dir: Path) -> dict[str, dict[str, Any]]:
    record = json.loads((runs_dir / "check.json").read_text())
    return {line["name"]: line for line in record["lines"]}


# ---------------------------------------------------------------------------------------------------- whole


def test_a_check_with_one_process(call: Call, tmp_path: Path, monkeypatch: Patch) -> None:
    """Devices, two trainings, a killed one, a swap and questions: the commands themselves, each in its process."""
    monkeypatch.setattr(check_processes, "subprocess", SimpleNamespace(Popen=forked.popen))
    words = ["hardware=cpu", *SMALL, "check.methods=[full,lora]", f"runs_dir={tmp_path}", "eval.max_gen_toks=4"]
    told = call("stage=check", *words, status=0)
    first = told.err.splitlines()[0]
    assert first == "stage=check of model=small_bpe: 0.0 GB of disk"
    lines = lines_of(tmp_path)
    assert list(lines) == ["devices", "base", "full", "lora", "resume", "merge", "questions"]
    assert {line["state"] for line in lines.values()} == {"ok"}
    for method in ("full", "lora"):
        numbers = lines[method]["numbers"]
        assert numbers["dtypes"] == {"weights": ["float32"], "moments": ["float32"]}
        assert min(numbers[key] for key in ("tokens_a_second", "planned_tokens_a_second", "bytes", "planned_bytes")) > 0
    assert "resumed after step" in lines["resume"]["text"] and lines["resume"]["numbers"]["tensors"] == 38
    assert lines["questions"]["text"].startswith("8 of the merge by eval.backend=hf")
    text = (tmp_path / "check.json").read_text()
    assert str(tmp_path) not in text and "/" not in json.loads(text)["lines"][0]["text"]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["check.json"]
    assert not list(tmp_path.rglob("*.safetensors"))
    assert told.out.splitlines()[-1] == str(tmp_path / "check.json")


def test_two_processes_add_what_they_hold(tmp_path: Path) -> None:
    config: Any = compose(["stage=check", *TWO, f"runs_dir={tmp_path}"])
    _, found = check_lines.Checking(config, check.read_words(config), tmp_path / ".check").check_devices()
    assert [(rank["rank"], rank["sum"]) for rank in found["ranks"]] == [(0, [3.0, 3.0]), (1, [3.0, 3.0])]


# ---------------------------------------------------------------------------------------------------- with stand-ins


class Node:
    """What the commands of a check would leave on a node: its devices, manifests, and errors by line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rank = {"name": "the CPU", "memory": 64e9, "free": 64e9}
        self.devices: dict[str, Any] = {
            "ranks": [{**rank, "rank": n, "uuid": "cpu", "sum": [3.0, 3.0]} for n in range(2)],
            "backend": "gloo", "cuda": None, "nccl": None, "gigabytes_a_second": None,
        }  # fmt: skip
        self.errors: dict[str, str] = {}
        facts = {
            "dtypes": {"weights": ["float32"], "moments": ["float32"]}, "step_tokens_per_second": 9.0,
            "process_peak_bytes": 7, "loss": 1.0, "weights": {"root": "r", "digests": {"a": "1", "b": "2"}},
        }  # fmt: skip
        self.facts = {name: json.loads(json.dumps(facts)) for name in ("full", "partial", "resume", "merge")}
        self.facts["resume"]["resumed"] = [{"step": 1}]
        self.facts["questions"] = {}

    def set_ranks(self, *places: int, **facts: Any) -> None:
        for place in places:
            self.devices["ranks"][place] |= facts

    def command(self, name: str, words: list[str], code: Any = (), until: Any = None) -> str | None:
        if until:
            return None  # killed after its first resume point
        if name in self.errors:
            raise check_lines.Wrong(self.errors[name])
        if name == "devices":
            return json.dumps(self.devices)
        side = "language" if "expert=qac" in words else "math"
        manifest = Manifest(
            name=name, hash=name, decided_by={"stage": "sft"}, facts=self.facts[name],
            config={"expert": {"side": side}}, cost={"seconds": 2.0, "predicted_seconds": 1.0},
        )  # fmt: skip
        (self.folder / name).mkdir(exist_ok=True)
        manifest.write(self.folder / name)
        return f"{self.folder / name}\n"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: Patch) -> Node:
    there = Node(tmp_path)
    monkeypatch.setattr(check_lines.Checking, "command", lambda self, *given, **how: there.command(*given, **how))
    return there


@pytest.fixture
def checked(node: Node, call: Call, tmp_path: Path) -> Checked:
    """Run the check; line -> its state and text."""

    def run(*words: str, status: int = 1) -> dict[str, str]:
        told = call("stage=check", *TWO, "check.methods=[full,partial]", f"runs_dir={tmp_path}/runs", *words)
        assert told.status == status, told.err
        lines = lines_of(tmp_path / "runs")
        wrong = [name for name, line in lines.items() if line["state"] == "wrong"]
        if wrong:
            assert f"error: {check.pluralize(len(wrong), 'line')} of {len(lines)} wrong: {wrong[0]}" in told.err
        assert all(name in told.out for name in lines)
        return {name: f"{line['state']}: {line['text']}" for name, line in lines.items()}

    return run


def test_all_is_well(checked: Checked) -> None:
    assert {text.partition(":")[0] for text in checked(status=0).values()} == {"ok"}


# what a node has otherwise -> how its lines begin
FOUND: list[tuple[Callable[[Node], Any], dict[str, str]]] = [
    (lambda node: node.set_ranks(1, sum=[3.0, 2.0]), {
        "devices": "wrong: process 1 got [3.0, 2.0] as the sum over 2 processes by gloo, not 3.0:",
        "base": "left out: devices is wrong", "full": "left out: base is left out",
        "resume": "left out: full is left out", "questions": "left out: base is left out",
    }),
    (lambda node: node.set_ranks(0, 1, uuid="GPU-1", name="NVIDIA H100") or node.devices.update(cuda="12.8"), {
        "devices": "wrong: processes 0 and 1 are on one GPU: give each its own, or lower sft.processes",
    }),
    (lambda node: node.set_ranks(0, 1, memory=1e6), {
        "full": "left out: its plan is 0.7 GB for each process, and there are 0.0: see stage=plan",
        "resume": "left out: full is left out", "questions": "ok: 8 of the base",
        "merge": "left out: it needs a math and a language expert",
    }),
    (lambda node: node.facts["full"]["dtypes"].update(weights=["bfloat16", "float32"]), {
        "full": "wrong: trained weights are bfloat16, float32, and sft.weights=float32 gives float32",
    }),
    (lambda node: node.facts["full"]["dtypes"].update(moments=["bfloat16"]), {
        "full": "wrong: moments are bfloat16, and sft.optimizer=adamw gives float32", "partial": "ok",
        "resume": "left out: full is wrong",
    }),
    (lambda node: node.facts["resume"]["weights"]["digests"].update(b="3"), {
        "resume": "wrong: 1 of 2 tensors differ from those of the training that was not killed, the first b: resumed",
    }),
]  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), FOUND)
def test_what_is_wrong_leaves_out_what_needs_it(
    change: Callable[[Node], Any], expected: dict[str, str], node: Node, checked: Checked
) -> None:
    change(node)
    lines = checked(status=int("wrong" in str(expected)))
    assert {name: lines[name][: len(text)] for name, text in expected.items()} == expected
    assert "GPU-1" not in (node.folder / "runs/check.json").read_text()


def test_a_gpu_that_others_use(node: Node, checked: Checked) -> None:
    node.set_ranks(1, free=50e9)
    assert checked(status=0)["devices"].endswith("; 50.0 of 64.0 GB free")


def test_hardware_with_gpus_where_there_are_none(node: Node, call: Call, tmp_path: Path) -> None:
    call("stage=check", "hardware=a100_80x8", *SMALL, f"runs_dir={tmp_path}/runs", status=1)
    expected = "hardware=a100_80x8 has GPUs, and torch sees none here: check a node with GPUs, or hardware=cpu"
    assert lines_of(tmp_path / "runs")["devices"]["text"] == expected


def test_eight_bit_moments_are_what_their_recipe_gives(node: Node) -> None:
    config = compose(["stage=sft", "expert=math", "sft.weights=bfloat16", "sft.optimizer=adamw_8bit"])
    assert isinstance(config, TrainStage)
    manifest = Manifest(
        name="x", hash="x", decided_by={"stage": "sft"},
        facts={"dtypes": {"weights": ["bfloat16"], "moments": ["OptimState8bit", "bfloat16"]}},
    )  # fmt: skip
    check_lines.check_dtypes(manifest, config.sft)
    with pytest.raises(check_lines.Wrong, match="moments are OptimState8bit, bfloat16, and sft.optimizer=adamw gives"):
        check_lines.check_dtypes(manifest, replace(config.sft, optimizer="adamw"))


@pytest.mark.parametrize("name", ["full", "partial", "resume", "merge", "questions"])
def test_a_command_that_fails_is_a_wrong_line(name: str, node: Node, checked: Checked) -> None:
    node.errors[name] = "out of memory: lower sft.micro_batch_size"
    lines = checked()
    assert lines[name] == "wrong: out of memory: lower sft.micro_batch_size"
    assert [line for line, text in lines.items() if text.startswith("wrong")] == [name]


# ---------------------------------------------------------------------------------------------------- processes


def ended(tmp_path: Path, code: str, limit: float = 60, **how: Any) -> str | None:
    return check_lines.run_command(tmp_path / "run.log", [], limit, ("-c", code), **how)


def test_a_process_says_why_it_failed(tmp_path: Path) -> None:
    assert ended(tmp_path, "print('folder')") == "folder\n"
    failed = "import sys; print('error: eval.backend=vllm needs vllm\\nlast', file=sys.stderr); sys.exit(1)"
    with pytest.raises(check_lines.Wrong, match=r"^eval.backend=vllm needs vllm$"):
        ended(tmp_path, failed)
    with pytest.raises(check_lines.Wrong, match=r"^exit status -9$"):
        ended(tmp_path, "import os; os.kill(os.getpid(), 9)")


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(check_lines.Wrong, match="no end within 3 s, last printed: waiting"):
        ended(tmp_path, "import sys, time; print('waiting', file=sys.stderr, flush=True); time.sleep(600)", limit=3)


@pytest.mark.parametrize("ends", [True, False])
def test_killed_as_soon_as_there_is_a_resume_point(ends: bool, tmp_path: Path) -> None:
    work = tmp_path / ".work/hash/lease"
    code = "" if ends else f"import os, time; os.makedirs('{work}'); open('{work}/resume.json', 'w'); time.sleep(600)"
    found = ended(tmp_path, code, until=lambda: any(tmp_path.glob(".work/*/*/resume.json")))
    assert found == ("" if ends else None)


# ---------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("merge=soup", "stage=check does not read merge=soup: leave it out; it reads model, sft, recipe, partition,"),
        ("sft=lora", "stage=check sets sft itself, got sft=lora: leave it out; give check.methods=[full,lora]"),
        ("eval=belebele_0shot", "stage=check sets eval itself, got eval=belebele_0shot: leave it out; give eval."),
        ("sft.batch_size=5 sft.processes=2", "sft.batch_size=5 is not a multiple of sft.micro_batch_size=1 x sft.proc"),
        ("model=gemma3_270m", "model=hub:google/gemma-3-270m is not on this disk, and its shape is not known: fetch"),
    ],
)
def test_wrong_words_are_one_sentence_first(words: str, expected: str, node: Node, call: Call, tmp_path: Path) -> None:
    node.errors = dict.fromkeys(["devices"], "it ran")
    told = call("stage=check", *SMALL, f"runs_dir={tmp_path}/runs", *words.split())
    assert told.status == 1 and told.err.startswith(f"error: {expected}"), told.err
    assert not (tmp_path / "runs/check.json").exists()


def test_the_recipe_is_that_of_the_command(tmp_path: Path) -> None:
    """The first paper's math expert, whose batch has 4 rows, where model= is its base; partial has a partition."""
    config: Any = compose(["stage=check", f"runs_dir={tmp_path}", "model=llama3.1_8b", "hardware=a100_80x8"])
    plan = check_lines.Checking(config, check.read_words(config), tmp_path / ".check")
    full, partial = (compose(plan.training(method)) for method in ("full", "partial"))
    assert isinstance(full, TrainStage) and isinstance(partial, TrainStage)
    assert (full.sft.batch_size, full.sft.processes, full.sft.parallel) == (4, 4, "fsdp2")
    assert (full.sft.steps, full.deterministic, full.expert.name) == (3, False, "math")
    assert partial.partition and (partial.partition.name, partial.expert.name) == ("B", "qac")
    assert partial.deterministic is False
    assert plan.disk() > 12 * 8e9


# ---------------------------------------------------------------------------------------------------- the base


def test_a_folder_of_this_directory_is_trained_as_by_stage_sft(call: Call, tmp_path: Path, monkeypatch: Patch) -> None:
    """./own has no slash once it is normalized, and would be an option; errors name it as it was typed."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "data", rows=8, length=20)
    small: Any = compose(["stage=sft", "expert=math", "model=small_bpe"])
    write_base(tmp_path / "own", check_lines.fields_of(small.model), tmp_path / "data")
    config: Any = compose(["stage=check", "runs_dir=runs", "model=./own"])
    plan = check_lines.Checking(config, check.read_words(config), tmp_path / ".check")
    assert compose(plan.training("full")).model.path == str(tmp_path / "own")  # type: ignore[attr-defined]
    for folder, problem in (("gone", "is not a folder of"), ("data", "has no manifest.json, so it is not a finished")):
        told = call("stage=check", f"model=./{folder}", "runs_dir=runs")
        assert told.status == 1 and told.err.startswith(f"error: model=./{folder} {problem}"), told.err


@pytest.mark.parametrize("name", SHAPES)
def test_random_weights_have_the_true_shape(name: str) -> None:
    """Counted by transformers' own classes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = check_lines.fields_of(compose(["stage=sft", "expert=math", f"model={name}"]).model)  # type: ignore[attr-defined]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    assert sum(p.numel() for p in model.parameters()) == SHAPES[name].parameters
    assert len(model.model.layers) == SHAPES[name].layers


# ---------------------------------------------------------------------------------------------------- slurm


def test_one_job_of_slurm(node: Node, call: Call, tmp_path: Path, monkeypatch: Patch) -> None:
    submitted: list[Any] = []
    queue = {"3": "/elsewhere/runs/.slurm/check.sh", "4": f"{tmp_path}/.slurm/mine-1.sh"}

    def submit_script(launcher: Any, runs_dir: Path, file: Path, script: str, resources: Any, *_: Any) -> str:
        submitted.append((file, script, resources))
        queue["7"] = str(file.resolve())
        return "7"

    monkeypatch.setattr(check, "submit_script", submit_script)
    monkeypatch.setattr("pipeline.launch.slurm_commands.queued_jobs", lambda: queue)
    words = ["stage=check", "launcher=slurm", *TWO, "check.methods=[full]", f"runs_dir={tmp_path}"]
    for _ in range(2):  # the second finds the first in the queue
        told = call(*words)
        assert told.status == 75 and "job 7 is in the queue" in told.err and ".logs/slurm-7.log" in told.err
    ((file, script, resources),) = submitted
    assert file.parent == tmp_path / ".slurm" and (resources.gpus, resources.cpus) == (0, 2)
    command = next(line for line in script.splitlines() if "-m pipeline" in line)
    assert all(word in command for word in ("stage=check", *TWO, f"runs_dir={tmp_path}"))
    assert "launcher" not in command


# ---------------------------------------------------------------------------------------------------- the record


def test_the_record_names_nobody(monkeypatch: Patch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    text = check.anonymous(
        {
            "text": "error in /home/jdoe/runs/x.json on node17: HF_TOKEN=hf_abcdefghijklmnop",
            "uuid": "GPU-1",
            "words": ["model=/scratch/jdoe/llama", "model=./mine/llama", "3 GB/s", "2 of 3"],
            "bytes": 3,
            "device": "NVIDIA H100",
        }  # fmt: skip
    )
    assert json.loads(text) == {
        "uuid": None, "text": "error in x.json on …: HF_TOKEN=***",
        "words": ["model=llama", "model=llama", "3 GB/s", "2 of 3"],
        "bytes": 3, "device": "NVIDIA H100",
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- torch and driver


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "the NVIDIA driver is"),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4e000", "two processes are on one GPU: give"),
        ("libnccl.so.2: cannot open shared object file: No such file or directory", "NCCL is missing, by which"),
        ("Distributed package doesn't have NCCL built in", "NCCL is missing, by which"),
        ("-- Process 1 terminated\ntorch.OutOfMemoryError: CUDA out of memory.", "out of memory: lower sft.micro"),
    ],
)
def test_what_torch_and_nccl_print_is_one_sentence(text: str, sentence: str) -> None:
    found = error_sentence(RuntimeError(text))
    assert found is not None and found.startswith(sentence) and found.endswith("; nothing was published")


def test_the_driver_by_nvidia_smi_or_its_module(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(durations, "MODULE", tmp_path / "version")
    version = durations.driver_version.__wrapped__
    durations.listed_gpus.cache_clear()
    assert version() is None and durations.gpu_memory() is None
    (tmp_path / "nvidia-smi").write_text(f"#!{sys.executable}\nprint('470.82.01, 81559')\nprint('470.82.01, 81559')\n")
    os.chmod(tmp_path / "nvidia-smi", 0o755)
    durations.listed_gpus.cache_clear()
    assert version() == "470.82.01" and durations.gpu_memory() == 81559 * 2**20
    open_module = "Open Kernel Module for x86_64  560.35.03  Release Build"
    for text, number in {"x86_64 Kernel Module  535.104.05  Sat Aug": "535.104.05", open_module: "560.35.03"}.items():
        (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX {text}\nGCC version: gcc 12.2.0\n")
        assert version() == number
    durations.listed_gpus.cache_clear()
