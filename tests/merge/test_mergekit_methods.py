"""merge=mergekit.

Mergekit's own command line bit by bit (where a Python has mergekit), what is read and refused.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from by_mergekit import environment
from safetensors.torch import load_file
from test_adapters import lora  # noqa: F401

from pipeline.__main__ import main
from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.extras import mergekit
from pipeline.extras.mergekit import Mergekit
from pipeline.launch.launchers import make_single_run
from pipeline.launch.plan_file import Task
from pipeline.merge.stage import folders_of, write_elsewhere
from pipeline.models.checkpoint import digest_tensors, weights_root
from pipeline.runs.manifest import read_manifest
from pipeline.stages.rows import build

WEIGHTS = {"weight": [0.2, 0.9, 0.4]}
DENSE = {"weight": 0.6, "density": 0.5}
DELLA = {**DENSE, "epsilon": 0.1}
CASES: dict[str, tuple[tuple[str, ...], str | None, dict[str, Any], dict[str, Any]]] = {
    # method: its models, its base, their parameters, further keys
    "linear": (("0", "1"), None, WEIGHTS, {}),
    "model_stock": (("0", "1"), "base", {}, {}),
    "ties": (("0", "1"), "base", DENSE, {}),
    "della": (("0", "1"), "base", DELLA, {}),
    "sce": (("0", "1"), "base", {}, {"parameters": {"select_topk": 0.5}}),
}
COMMANDS = """
import json, sys
from mergekit.scripts.run_yaml import main
for words in json.load(open(sys.argv[1])):
    main(words, standalone_mode=False)
"""


def config_of(method: str, names: Mapping[str, str]) -> dict[str, Any]:
    models, base, parameters, further = CASES[method]
    listed = [
        {"model": names[model], **({"parameters": parameters} if parameters else {})}
        for model in models
    ]
    return {
        "merge_method": method,
        "models": listed,
        **({"base_model": names[base]} if base else {}),
        **further,
    }


def write(file: Path, config: Any) -> Path:
    file.write_text(config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False))
    return file


TWO = [{"model": "0"}, {"model": "1"}]
ROLES = {"0": "0", "1": "1", "base": "base"}


# --- against mergekit ---


@pytest.fixture(scope="module")
def theirs(models: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for each method with the output of `mergekit-yaml --random-seed 3`.

    One process writes all of them.
    """
    folder = tmp_path_factory.mktemp("mergekit")
    names = dict(zip(("base", "0", "1"), map(str, models["llama"]), strict=True))
    commands = [
        [
            str(write(folder / f"{method}.yaml", config_of(method, names))),
            str(folder / method),
            "--random-seed",
            "3",
        ]
        for method in CASES
    ]
    (folder / "commands.json").write_text(json.dumps([[*words, "--quiet"] for words in commands]))
    words = [os.environ["PIPELINE_TEST_MERGEKIT"], "-c", COMMANDS, str(folder / "commands.json")]
    subprocess.run(words, check=True, env=environment())
    return folder


@pytest.mark.mergekit
@pytest.mark.parametrize("method", CASES)
def test_the_bits_are_those_of_the_command_line(
    method: str, theirs: Path, models: dict[str, list[Path]], runs_dir: Path, tmp_path: Path
) -> None:
    base, math, language = models["llama"]
    file = write(tmp_path / "mine.yaml", config_of(method, ROLES))
    words = [
        f"merge.file={file}",
        f"merge.experts=[{math},{language}]",
        f"merge.base={base}",
        "merge.seed=3",
    ]
    if len({*CASES[method][0], CASES[method][1]} - {"base", None}) < 2:
        words[1] = f"merge.experts=[{math}]"
    folder = made(runs_dir, *words)
    merged, found = (
        load_file(next(place.glob("*.safetensors"))) for place in (folder, theirs / method)
    )
    assert set(merged) == set(found)
    for name, tensor in merged.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name


def made(runs_dir: Path, *words: str) -> Path:
    python = f"merge.mergekit_python={os.environ['PIPELINE_TEST_MERGEKIT']}"
    more = [f"runs_dir={runs_dir}", "tracking.mode=disabled"]
    return make_single_run(compose(["stage=merge", "merge=mergekit", *words, python, *more]))  # type: ignore[arg-type]


@pytest.mark.mergekit
def test_a_merge_of_another_depth_is_a_run_like_any_other(
    models: dict[str, list[Path]], runs_dir: Path, tmp_path: Path
) -> None:
    """Slices of both experts stacked, a result in another dtype, and an error of mergekit's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, math, language = models["llama"]
    depth = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    slices = [{"sources": [{"model": model, "layer_range": [0, depth]}]} for model in (0, 1)]
    file = write(
        tmp_path / "mine.yaml",
        {"merge_method": "passthrough", "slices": slices, "out_dtype": "float32"},
    )
    words = [f"merge.file={file}", f"merge.experts=[{math},{language}]"]
    folder = made(runs_dir, *words)
    result, *experts = (load_file(path / "model.safetensors") for path in (folder, math, language))
    for layer in range(2 * depth):
        own = f"model.layers.{layer % depth}.mlp.up_proj.weight"
        assert torch.equal(
            result[f"model.layers.{layer}.mlp.up_proj.weight"], experts[layer // depth][own].float()
        )
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.num_hidden_layers == 2 * depth and loaded.dtype == torch.float32
    ours, theirs = (
        AutoTokenizer.from_pretrained(place)("a b").input_ids for place in (folder, math)
    )
    assert ours == theirs
    manifest = read_manifest(folder)
    assert manifest and manifest.decided_by["packages"] == {"mergekit": "mergekit 0.1.5"}
    assert manifest.decided_by["file"]["slices"][1]["sources"][0] == {
        "model": "1",
        "layer_range": [0, depth],
    }
    assert manifest.weights_root == weights_root(digest_tensors(folder))
    write(file, {"merge_method": "slurp", "models": TWO})
    with pytest.raises(PipelineError, match="merge.file=.*: mergekit stopped .*slurp"):
        made(runs_dir, *words)


@pytest.mark.mergekit
def test_lora_experts_are_merged_into_their_base_by_mergekit(
    lora: dict[str, Path],  # noqa: F811
    models: dict[str, list[Path]],
    runs_dir: Path,
    tmp_path: Path,  # noqa: F811
) -> None:
    """In mergekit's own form, base+adapter; PEFT gives the same weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = models["llama"][0]
    file = write(
        tmp_path / "mine.yaml",
        {"merge_method": "linear", "models": TWO, "parameters": {"weight": 0.5}},
    )
    folder = made(
        runs_dir,
        f"merge.file={file}",
        f"merge.experts=[{lora['math']},{lora['language']}]",
        f"merge.base={base}",
    )
    wholes = []
    for name in ("math", "language"):
        whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        wholes.append(PeftModel.from_pretrained(whole, lora[name]).merge_and_unload().state_dict())
    for name, tensor in load_file(next(folder.glob("*.safetensors"))).items():
        expected = (wholes[0][name] + wholes[1][name]) / 2
        torch.testing.assert_close(tensor.float(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.mergekit
def test_a_row_of_a_table(
    math_expert: Path,
    language_expert: Path,
    world: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The base is that of the experts' manifests; the merge is deleted after it is scored."""
    runs = {
        "math": {"checkpoint": str(math_expert)},
        "language": {"checkpoint": str(language_expert)},
        "merged": {
            "merge": "mergekit",
            "merge.experts": ["math", "language"],
            "merge.file": str(write(tmp_path / "mine.yaml", config_of("model_stock", ROLES))),
        },
    }
    table = {
        "name": "mine",
        "title": "mine",
        "every": {"data_root": str(world)},
        "runs": runs,
        "score": {
            "eval": "sandbox",
            "task": "mgsm",
            "in": "en",
            "eval.limit": 2,
            "eval.max_gen_toks": 4,
        },
        "columns": {"math": "math", "merged": "merged"},
        "rows": {"English": {}},
    }
    words = [
        f"table={write(tmp_path / 'table.yaml', table)}",
        f"runs_dir={tmp_path / 'runs'}",
        "tracking.mode=disabled",
        f"every.merge.mergekit_python={os.environ['PIPELINE_TEST_MERGEKIT']}",
    ]
    assert main(["stage=table", *words, "launcher.workers=1"]) == 0, capfd.readouterr().err
    (folder,) = (tmp_path / "runs").glob("eval-*mergekit-model_stock-*")
    assert not [*(tmp_path / "runs").rglob("*.safetensors")]
    manifest = read_manifest(folder)
    assert manifest and manifest.decided_by["packages"] == {"mergekit": "mergekit 0.1.5"}


# --- without mergekit ---


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Set the version of mergekit that is found. Nothing of it runs."""

    def version(text: str | None) -> None:
        mergekit.mergekit_version.cache_clear()

        def run(*_: Any, **__: Any) -> SimpleNamespace:
            if text is None:
                raise subprocess.CalledProcessError(1, "python")
            return SimpleNamespace(stdout=f"{text}\n")

        monkeypatch.setattr(subprocess, "run", run)

    version("0.1.5")
    yield version
    mergekit.mergekit_version.cache_clear()


def built(file: Path, models: dict[str, list[Path]], *more: str) -> Any:
    base, math, language = models["llama"]
    words = [f"merge.experts=[{math},{language}]", f"merge.base={base}", *more]
    return build(compose(["stage=merge", "merge=mergekit", f"merge.file={file}", *words]))  # type: ignore[arg-type]


def test_the_hash_covers_content_and_version_but_no_paths(
    installed: Callable[[str], None], models: dict[str, list[Path]], tmp_path: Path
) -> None:
    file = write(tmp_path / "a.yaml", config_of("ties", ROLES))
    run = built(file, models)
    assert run.label == "mergekit-ties-math-language" and list(run.parents) == ["0", "1", "base"]
    assert Task(**json.loads(json.dumps(vars(Task.of(run))))).run().hash == run.hash
    spaced = write(tmp_path / "b.yaml", "# a comment\n" + file.read_text())
    assert built(spaced, models, "merge.mergekit_python=python").hash == run.hash
    hashes = {run.hash, built(file, models, "merge.seed=1").hash}
    hashes.add(built(write(file, config_of("sce", ROLES)), models).hash)
    with pytest.raises(PipelineError, match="a file that merge=mergekit reads has changed. Rerun"):
        folders_of(run)
    write(file, config_of("ties", ROLES))
    installed("0.2.0")
    assert len(hashes | {built(file, models).hash}) == 4


@pytest.mark.parametrize(
    ("config", "words", "expected"),
    [
        (None, [], "merge.file=.* cannot be read .No such file"),
        ({"models": TWO}, [], "it has no merge_method"),
        (
            {"merge_method": "linear", "models": [*TWO, {"model": "2"}]},
            [],
            "the model 2 is not among 0, 1, base",
        ),
        (
            {"merge_method": "linear", "models": [*TWO, {"model": "./m"}]},
            [],
            r"the model \./m is not among 0, 1, base",
        ),
        (
            {"merge_method": "linear", "models": TWO},
            ["merge.dtype=float32"],
            "merge.dtype=float32 is not read",
        ),
        (
            {"merge_method": "linear", "models": TWO},
            ["merge.form=dense"],
            "merge.form=dense is not read",
        ),
        ({"merge_method": "linear", "models": TWO}, ["partition=B"], "Leave partition=B out"),
    ],
)
def test_what_is_refused_before_a_run(
    config: Any,
    words: list[str],
    expected: str,
    installed: Callable[[str], None],
    models: dict[str, list[Path]],
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.yaml"
    if config is not None:
        write(file, config)
    with pytest.raises(PipelineError, match=expected):
        built(file, models, *words)


def test_a_python_without_mergekit(
    installed: Callable[[str | None], None],
    models: dict[str, list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = write(tmp_path / "a.yaml", config_of("linear", ROLES))
    installed(None)
    with pytest.raises(PipelineError, match="which .*python.* does not have.*mergekit_python=PATH"):
        built(file, models)
    with pytest.raises(PipelineError, match="which other does not have. Run pip install"):
        built(file, models, "merge.mergekit_python=other")
    monkeypatch.undo()
    with pytest.raises(PipelineError, match="which /nowhere does not have"):
        built(file, models, "merge.mergekit_python=/nowhere")


def test_a_source_that_its_run_did_not_write_is_refused(
    installed: Callable[[str], None],
    math_expert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One byte of a tensor is changed after the run was built."""
    expert = shutil.copytree(math_expert, tmp_path / math_expert.name)
    file = write(tmp_path / "a.yaml", {"merge_method": "passthrough", "models": TWO[:1]})
    run = build(
        compose(
            ["stage=merge", "merge=mergekit", f"merge.file={file}", f"merge.experts=[{expert}]"]
        )
    )  # type: ignore[arg-type]
    monkeypatch.setattr(
        Mergekit, "write_folder", lambda self, sources, folder, threads: pytest.fail("mergekit ran")
    )
    with (expert / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        last = weights.read(1)
        weights.seek(-1, 2)
        weights.write(bytes([last[0] ^ 1]))
    with pytest.raises(PipelineError, match="is not the tensor that the run wrote"):
        write_elsewhere(run, tmp_path)  # type: ignore[arg-type]
