#!/usr/bin/env python
"""List the branches of src/pipeline that only run with CUDA, and their stand-in tests.

    python scripts/cuda_branches.py             # the list, and branches that never run here
    python scripts/cuda_branches.py --verify    # run the stand-in tests, and check that they
                                                # reach the branches

Branches are found in the syntax: torch.cuda, CUDA's names for variables, errors and libraries,
comparisons with a device or with fsdp2, and the trainer's is_fsdp_enabled. A place is a function.
`reached` is part of a line that only runs with CUDA. An H100 and an H200 have executed most
branches (results/README.md). The exceptions are vLLM, several GPUs, and flash attention without
padding.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src/pipeline"
WORDS = re.compile(r"cuda|nccl|cublas|flash|OutOfMemoryError", re.IGNORECASE)


class StandIn(NamedTuple):
    """The stand-in test of a branch.

    Attributes:
        test: the file and its function.
        reached: part of the line that the test executes. It is empty if the line runs in another
            process, which cannot be traced.
    """

    test: str
    reached: str


HERE = "tests/test_cuda_branches.py::"
PROCESSES = "tests/train/test_processes.py::"
MEMORY = "tests/study/test_cost.py::test_memory_of_the_choices"
TRAINER = HERE + "test_the_trainer_is_on_the_gpu_and_shards"
DECODE = "tests/evaluate/test_decode.py::"
EXCHANGED = "tests/study/test_rates.py::test_what_cards_exchange_by_hand"
STAND_INS = {
    "estimate/durations.py::visible_gpus": StandIn(
        "tests/study/test_local.py::test_as_many_workers_as_cores_have_threads_for", "listed.split"
    ),
    "evaluate/decode.py::decode": StandIn(
        DECODE + "test_shapes_rounded_up_change_no_answer", "on_gpu = "
    ),
    "evaluate/shared_cache.py::SharedCache.__init__": StandIn(
        DECODE + "test_shapes_rounded_up_change_no_answer", "cuda"
    ),
    "estimate/flops.py::bytes_between": StandIn(EXCHANGED, "+ 4 * moved"),
    "estimate/flops.py::training_seconds": StandIn(EXCHANGED, "bytes_between"),
    "evaluate/steps.py::Steps.next": StandIn(
        DECODE + "test_shapes_rounded_up_change_no_answer", "clone()"
    ),
    "evaluate/steps.py::columns_for": StandIn(
        DECODE + "test_shapes_rounded_up_change_no_answer", "COLUMNS"
    ),
    "evaluate/steps.py::rows_for": StandIn(
        DECODE + "test_shapes_rounded_up_change_no_answer", "bit_length"
    ),
    "evaluate/stage.py::make": StandIn(
        "tests/test_knobs.py::test_evaluation", "torch.cuda.is_available()"
    ),
    "evaluate/shared_cache.py::heads_as_they_are": StandIn(
        HERE + "test_heads_are_copied_on_a_gpu", "yield"
    ),
    "evaluate/score.py::rounding_settings": StandIn(
        HERE + "test_scores_name_the_card", "get_device_name"
    ),
    "evaluate/torch_backend.py::TorchBackend.load": StandIn(
        HERE + "test_models_are_scored_on_the_gpu", ".to(device)"
    ),
    "evaluate/torch_backend.py::TorchBackend._fit_rows": StandIn(
        "tests/evaluate/test_rows_by_memory.py::test_as_many_rows_as_the_free_memory_holds",
        "rows_that_fit",
    ),
    "evaluate/torch_backend.py::most_rows": StandIn(
        "tests/evaluate/test_rows_by_memory.py::test_on_a_cpu_there_are_32", "MOST_ROWS"
    ),
    "evaluate/torch_backend.py::TorchBackend.halving": StandIn(
        HERE + "test_memory_is_given_back_before_a_smaller_batch", "empty_cache()"
    ),
    "launch/in_process.py::refuse_without_gpus": StandIn(
        "tests/study/test_gpus_asked.py::test_more_processes_than_gpus", "raise PipelineError"
    ),
    "launch/in_process.py::error_sentence": StandIn(
        HERE + "test_a_full_gpu_is_one_sentence", "return OUT_OF_MEMORY"
    ),
    "runs/provenance.py::machine_facts": StandIn(
        HERE + "test_manifests_name_the_card", "get_device_name"
    ),
    "train/memory.py::is_sharded": StandIn(MEMORY, "return sft.parallel"),
    "train/processes.py::join_processes": StandIn(
        HERE + "test_processes_meet_as_gpus", "PartialState(cpu"
    ),
    "train/trainer.py::trainer_of": StandIn(
        "tests/train/test_simultaneous.py::test_shards_that_are_not_in_the_hash_are_refused",
        "raise PipelineError",
    ),
    "train/trainer.py::Trainer.training_step": StandIn(
        PROCESSES + "test_shards_have_the_dtypes_of_the_recipe", ""
    ),
    "train/stage.py::prepare_process": StandIn(
        "tests/train/test_stage.py::test_a_low_rate_with_adapters_is_warned_of_and_determinism_reaches_cublas",
        "CUBLAS_WORKSPACE_CONFIG",
    ),
    "train/load.py::check_kernels": StandIn(
        HERE + "test_kernels_that_a_gpu_lacks", "get_device_capability"
    ),
    "train/trainer.py::trainer_arguments": StandIn(TRAINER, "use_cpu="),
    "train/trainer.py::Trainer.autocast_smart_context_manager": StandIn(
        PROCESSES + "test_shards_have_the_dtypes_of_the_recipe", ""
    ),
}
# Place -> the code that only runs with CUDA, and the nearest test
NEVER = {
    "evaluate/steps.py::Steps._record": (
        "graphs of steps; tests/evaluate/test_on_a_gpu.py needs a card"
    ),
    "train/stage.py::check_early": (
        "no warning of bfloat16 where a card computes it; that of a CPU is tested"
    ),
    "train/stage.py::train": (
        "the most memory of the card that a process reserved; a CPU's peak is tested"
    ),
}
# Place -> the number of its lines with a branch, if it has several. A new branch adds a line.
LINES = {
    "evaluate/score.py::rounding_settings": 2,
    "evaluate/steps.py::Steps._record": 4,
    "evaluate/steps.py::Steps.next": 2,
    "evaluate/torch_backend.py::TorchBackend._fit_rows": 3,
    "evaluate/torch_backend.py::TorchBackend.halving": 2,
    "train/load.py::check_kernels": 2,
    "train/trainer.py::trainer_arguments": 2,
}
# Code of libraries that runs only with CUDA
LIBRARIES = (
    (
        "NCCL: collectives are gloo's in tests, and none at all in"
        " tests/train/shapes_on_fake_tensors.py"
    ),
    "the fused AdamW of CUDA: the CPU's is tested",
    "flash and memory-efficient attention of CUDA: sdpa is the CPU's in tests",
    "TRL's Triton kernels of the loss: their stand-ins in torch are tested",
    "torchao's compiled step: it runs uncompiled in tests",
)


def places() -> dict[str, list[tuple[int, str]]]:
    """Return function -> (line, code) of the branches that only CUDA decides."""
    found: dict[str, list[tuple[int, str]]] = {}
    for path in sorted(SRC.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr):
                docstrings.add(id(node.value))
        for node, name in with_function(tree, ""):
            if not name or id(node) in docstrings:
                continue
            code = of_cuda(node)
            if code:
                place = f"{path.relative_to(SRC)}::{name}"
                found.setdefault(place, []).append((node.lineno, code))
    return found


def with_function(node: ast.AST, name: str) -> Iterator[tuple[ast.expr, str]]:
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
        if isinstance(child, ast.expr):
            yield child, inner
        yield from with_function(child, inner)


def of_cuda(node: ast.expr) -> str | None:
    """Return the code of an expression that depends on CUDA, or None for other expressions."""
    if isinstance(node, ast.Attribute):
        code = ast.unparse(node)
        if code.startswith("torch.cuda.") or node.attr == "is_fsdp_enabled":
            return code
        return None
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str) and WORDS.search(node.value):
            return repr(node.value)
        return None
    if isinstance(node, ast.Compare):
        values = []
        for side in (node.left, *node.comparators):
            if isinstance(side, ast.Constant):
                values.append(side.value)
        if {"cpu", "cuda", "fsdp2"} & set(values):
            return ast.unparse(node)
    return None


def lines_of(place: str) -> dict[int, str]:
    """Return number -> text of the lines of a function."""
    file, _, name = place.partition("::")
    text = (SRC / file).read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        node = definition(node, part)
    lines = text.splitlines()
    first, last = node.lineno, node.end_lineno or 0  # type: ignore[attr-defined]
    return {number: lines[number - 1] for number in range(first, last + 1)}


def definition(tree: ast.AST, name: str) -> ast.AST:
    """Return the only function or class of this name."""
    found = []
    for node in ast.walk(tree):
        if getattr(node, "name", None) == name and hasattr(node, "body"):
            found.append(node)
    [node] = found
    return node


def problems() -> list[str]:
    """Return the errors of the lists.

    Each place must be in one list, and each test and line must exist.
    """
    found, wrong = places(), []
    listed = STAND_INS.keys() | NEVER.keys()
    for place in sorted(found.keys() - listed):
        _, code = found[place][0]
        wrong.append(f"{place} has a branch for CUDA ({code}) and is in neither list")
    for place in sorted(listed - found.keys()):
        wrong.append(f"{place} is listed and has no branch for CUDA")
    for place in sorted(found.keys() & listed):
        lines = sorted({line for line, _ in found[place]})
        expected = LINES.get(place, 1)
        if len(lines) != expected:
            wrong.append(
                f"{place}: CUDA decides in lines {lines}, but {expected} are expected. Is one new?"
            )
    for place, (test, reached) in STAND_INS.items():
        if not has_test(test):
            wrong.append(f"{place}: there is no {test}")
        if place in found and not any(reached in text for text in lines_of(place).values()):
            wrong.append(f"{place}: no line with {reached}")
    return wrong


def has_test(test: str) -> bool:
    name, _, function = test.partition("::")
    file = ROOT / name
    if not file.is_file():
        return False
    return re.search(rf"^def {function}\(", file.read_text(), re.MULTILINE) is not None


# --- reached? ---

# The variable names the file of reached lines. pytest writes it with this module as a plugin.
SEEN = "PIPELINE_CUDA_BRANCHES"


def pytest_configure(config: object) -> None:
    """Trace the lines of the places, and write each reached place with its test."""
    if SEEN not in os.environ:
        return
    environment = os.environ  # Tests replace os.environ, so this one is kept.
    wanted: dict[tuple[str, int], str] = {}
    for place, (_, reached) in STAND_INS.items():
        for number, text in lines_of(place).items():
            if reached and reached in text:
                wanted[str(SRC / place.partition("::")[0]), number] = place
    files = {file for file, _ in wanted}

    def trace(frame: object, event: str, argument: object) -> object:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call":
            if code.co_filename in files:
                return trace
            return None
        place = wanted.get((code.co_filename, frame.f_lineno))  # type: ignore[attr-defined]
        if place:
            test = re.split(r"[ \[]", environment["PYTEST_CURRENT_TEST"])[0]
            with open(environment[SEEN], "a") as file:
                file.write(f"{place} {test}\n")
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]


def unreached(folder: Path) -> list[str]:
    """Return the places whose stand-in test did not execute their line."""
    tests = set()
    for test, reached in STAND_INS.values():
        if reached:
            tests.add(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "cuda_branches"]
    command += ["-p", "no:cacheprovider", *sorted(tests)]
    paths = [str(Path(__file__).parent)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment[SEEN] = str(folder / "seen")
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=sys.stderr)
    seen = set((folder / "seen").read_text().splitlines())
    found = []
    for place, (test, reached) in STAND_INS.items():
        if reached and f"{place} {test}" not in seen:
            found.append(place)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run the stand-in tests, and check that they reach the branches",
    )
    wrong = problems()
    if parser.parse_args().verify and not wrong:
        with TemporaryDirectory() as folder:
            for place in unreached(Path(folder)):
                wrong.append(f"{place}: {STAND_INS[place].test} does not reach it")
    print(f"{len(STAND_INS)} functions with a branch for CUDA, executed by a stand-in:")
    for place, (test, _) in STAND_INS.items():
        print(f"  {place}: {test}")
    print(f"never executed here, {len(NEVER)} functions:")
    for place, reason in NEVER.items():
        print(f"  {place}: {reason}")
    print("nor, of libraries:")
    for reason in LIBRARIES:
        print(f"  {reason}")
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if wrong:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
