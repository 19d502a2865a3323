"""merge=mergekit: mergekit's own command line bit by bit (where a Python has mergekit), what is read and refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from as_torch import as_torch
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
from pipeline.merge.live import model_of
from pipeline.merge.merge import open_merge
from pipeline.merge.stage import merge_of
from pipeline.models.checkpoint import Checkpoint
from pipeline.runs.manifest import read_manifest
from pipeline.stages.rows import build

WEIGHTS = {"weight": [0.2, 0.9, 0.4]}
DENSE = {"weight": 0.6, "density": 0.5}
DELLA = {**DENSE, "epsilon": 0.1}
CASES: dict[str, tuple[tuple[str, ...], str | None, dict[str, Any], dict[str, Any]]] = {
    # method: its models, its base, their parameters, further keys
    "linear": (("0", "1"), None, WEIGHTS, {}),
    "karcher": (("0", "1"), None, {}, {"out_dtype": "float32"}),
    "multislerp": (("0", "1"), None, WEIGHTS, {}),
    "slerp": (("0", "1"), "0", {}, {"parameters": {"t": [{"filter": "mlp", "value": 0.3}, {"value": 0.6}]}}),
    "nuslerp": (("0", "1"), None, {"weight": 0.5}, {"dtype": "float32", "out_dtype": "bfloat16"}),
    "nearswap": (("1",), "0", {}, {"parameters": {"t": 0.02}}),
    "arcee_fusion": (("1",), "0", {}, {"out_dtype": "bfloat16"}),
    "model_stock": (("0", "1"), "base", {}, {}),
    "passthrough": (("0",), None, {"scale": 0.9}, {}),
    "task_arithmetic": (("0", "1"), "base", WEIGHTS, {"parameters": {"lambda": 0.7}}),
    "ties": (("0", "1"), "base", DENSE, {}),
    "dare_ties": (("0", "1"), "base", DENSE, {}),
    "dare_linear": (("0", "1"), "base", DENSE, {}),
    "breadcrumbs": (("0", "1"), "base", {**DENSE, "gamma": 0.01}, {}),
    "breadcrumbs_ties": (("0", "1"), "base", {**DENSE, "gamma": 0.01}, {}),
    "della": (("0", "1"), "base", DELLA, {}),
    "della_linear": (("0", "1"), "base", DELLA, {}),
    "sce": (("0", "1"), "base", {}, {"parameters": {"select_topk": 0.5}}),
    "ram": (("0", "1"), "base", {}, {}),
    "ramplus_tl": (("0", "1"), "base", {}, {"out_dtype": "float32"}),
}
COMMANDS = """
import json, sys
from mergekit.scripts.run_yaml import main
for words in json.load(open(sys.argv[1])):
    main(words, standalone_mode=False)
"""


def config_of(method: str, names: Mapping[str, str]) -> dict[str, Any]:
    models, base, parameters, further = CASES[method]
    listed = [{"model": names[model], **({"parameters": parameters} if parameters else {})} for model in models]
    return {"merge_method": method, "models": listed, **({"base_model": names[base]} if base else {}), **further}


def write(file: Path, config: Any) -> Path:
    file.write_text(config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False))
    return file


ROLES = {"0": "0", "1": "1", "base": "base"}


# ------------------------------------------------------------------------------------------------ against mergekit


@pytest.fixture(scope="module")
def theirs(models: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each method with what `mergekit-yaml --random-seed 3` writes; one process for all."""
    folder = tmp_path_factory.mktemp("mergekit")
    names = dict(zip(("base", "0", "1"), map(str, models["llama"]), strict=True))
    commands = [
        [str(write(folder / f"{method}.yaml", config_of(method, names))), str(folder / method), "--random-seed", "3"]
        for method in CASES
    ]
    (folder / "commands.json").write_text(json.dumps([[*words, "--quiet"] for words in commands]))
    words = [os.environ["PIPELINE_TEST_MERGEKIT"], "-c", COMMANDS, str(folder / "commands.json")]
    subprocess.run(words, check=True, env=environment())
    return folder


@pytest.mark.mergekit
@pytest.mark.parametrize("method", CASES)
def test_the_bits_are_those_of_the_command_line(
    method: str, theirs: Path, models: dict[str, list[Path]], tmp_path: Path
) -> None:
    base, math, language = models["llama"]
    file = write(tmp_path / "mine.yaml", config_of(method, ROLES))
    words = [f"merge.file={file}", f"merge.experts=[{math},{language}]", f"merge.base={base}", "merge.seed=3"]
    if len({*CASES[method][0], CASES[method][1]} - {"base", None}) < 2:
        words[1] = f"merge.experts=[{math}]"
    python = f"merge.mergekit_python={os.environ['PIPELINE_TEST_MERGEKIT']}"
    run = build(compose(["stage=merge", "merge=mergekit", *words, python]))  # type: ignore[arg-type]
    merge, found = merge_of(run), load_file(next((theirs / method).glob("*.safetensors")))
    assert set(merge.names) == set(found)
    for name in merge.names:
        ours = as_torch(merge, name)
        assert ours.dtype == found[name].dtype and torch.equal(ours, found[name]), name
    for name, parameter in model_of(merge, "auto", "cpu").model.named_parameters():  # as an evaluation has it
        assert torch.equal(parameter.data, found[name])


@pytest.mark.mergekit
def test_a_written_merge_says_what_made_it(models: dict[str, list[Path]], runs_dir: Path, tmp_path: Path) -> None:
    """Models as RUNs in the file, gradients and slices; a result in another dtype; an error of mergekit's."""
    base, math, language = models["llama"]
    depth = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    parts = zip((math, language), ([0, 2], [2, depth]), strict=True)
    slices = [{"sources": [{"model": str(model), "layer_range": part}]} for model, part in parts]
    file = write(tmp_path / "mine.yaml", {"merge_method": "passthrough", "slices": slices, "out_dtype": "float32"})
    python = f"merge.mergekit_python={os.environ['PIPELINE_TEST_MERGEKIT']}"
    words = ["stage=merge", "merge=mergekit", f"merge.file={file}", python, f"runs_dir={runs_dir}"]
    folder = make_single_run(compose([*words, "tracking.mode=disabled"]))  # type: ignore[arg-type]
    result, *experts = (load_file(path / "model.safetensors") for path in (folder, math, language))
    for name in (f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(depth)):
        assert torch.equal(result[name], experts[int(name.split(".")[2]) >= 2][name].float())
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    manifest = read_manifest(folder)
    assert manifest and manifest.decided_by["packages"] == {"mergekit": "mergekit 0.1.5"}
    assert manifest.decided_by["file"]["slices"][1]["sources"][0] == {"model": "1", "layer_range": [2, depth]}
    assert "cast" not in manifest.facts
    write(file, {"merge_method": "slurp", "models": [{"model": str(math)}]})
    with pytest.raises(PipelineError, match="merge.file=.*: mergekit stopped .*slurp"):
        make_single_run(compose([*words, "tracking.mode=disabled"]))  # type: ignore[arg-type]


@pytest.mark.mergekit
def test_a_row_of_a_table(
    math_expert: Path, language_expert: Path, world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The base is that of the experts' manifests; the merge is scored in memory."""
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
        "name": "mine", "title": "mine", "every": {"data_root": str(world)}, "runs": runs,
        "score": {"eval": "sandbox", "task": "mgsm", "in": "en", "eval.limit": 2, "eval.max_gen_toks": 4},
        "columns": {"math": "math", "merged": "merged"}, "rows": {"English": {}},
    }  # fmt: skip
    words = [
        f"table={write(tmp_path / 'table.yaml', table)}",
        f"runs_dir={tmp_path / 'runs'}",
        "tracking.mode=disabled",
        f"every.merge.mergekit_python={os.environ['PIPELINE_TEST_MERGEKIT']}",
    ]
    assert main(["stage=table", *words, "launcher.workers=1"]) == 0, capfd.readouterr().err
    (folder,) = (tmp_path / "runs").glob("eval-*mergekit-model_stock-*")
    manifest = read_manifest(folder)
    assert manifest and manifest.decided_by["packages"] == {"mergekit": "mergekit 0.1.5"}


# ------------------------------------------------------------------------------------------------ without mergekit


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the version of mergekit that is found; nothing of it runs."""

    def version(text: str | None) -> None:
        mergekit.mergekit_version.cache_clear()
        answer = SimpleNamespace(stdout=f"{text}\n", returncode=int(text is None))
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)  # in another Python
        monkeypatch.setattr(mergekit, "package_version", lambda name: text or "absent")  # in this one

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
    folders = dict(zip(("base", "0", "1"), map(str, models["llama"]), strict=True))
    named = write(tmp_path / "c.yaml", config_of("ties", folders))
    whole = build(compose(["stage=merge", "merge=mergekit", f"merge.file={named}"]))  # type: ignore[arg-type]
    assert (whole.hash, whole.parents.keys()) == (run.hash, run.parents.keys())
    hashes = {run.hash, built(file, models, "merge.seed=1").hash}
    hashes.add(built(write(file, config_of("sce", ROLES)), models).hash)
    with pytest.raises(PipelineError, match="what merge=mergekit reads changed meanwhile: rerun the command"):
        merge_of(run)
    write(file, config_of("ties", ROLES))
    installed("0.2.0")
    assert len(hashes | {built(file, models).hash}) == 4


def test_what_mergekit_wrote_becomes_the_merge(
    installed: Callable[[str], None], models: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process is played: it is asked for the file's merge of these folders, and gives language's weights."""
    from pipeline.extras import by_mergekit

    base, math, language = models["llama"]
    asked: list[dict[str, Any]] = []

    def run(words: list[str], cwd: Path = tmp_path, **_: Any) -> SimpleNamespace:
        if words[2] == mergekit.VERSION:
            return SimpleNamespace(stdout="0.1.5", returncode=0)
        assert Path(words[0]).is_file() and words[0].startswith("/")
        options = dict(zip(words[-6::2], words[-5::2], strict=True))
        asked.append({"config": yaml.safe_load((cwd / words[3]).read_text()), "options": options})
        (cwd / words[4]).symlink_to(language)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(by_mergekit.subprocess, "run", run)
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "a.yaml", config_of("sce", ROLES))
    config = Mergekit(file=str(file), experts=["m", "l"], seed=5, mergekit_python="./python")
    sources = {"0": Checkpoint.open(math), "1": Checkpoint.open(language)}
    merge = open_merge(config, sources, Checkpoint.open(base))
    assert not asked  # only when tensors are wanted
    merge.ready(2)
    read = [Path(model["model"]) for model in asked[0]["config"]["models"]]
    assert [link.resolve() for link in [*read, Path(asked[0]["config"]["base_model"])]] == [math, language, base]
    assert asked[0]["options"] == {"--random-seed": "5", "--device": "cpu", "--num-threads": "2"}
    theirs = load_file(language / "model.safetensors")
    assert all(torch.equal(as_torch(merge, name), theirs[name]) for name in merge.names)
    write(Path(config.file), {**config_of("sce", ROLES), "out_dtype": "float16"})
    with pytest.raises(PipelineError, match="gives .* as BF16, of these models it is .* as F16: give out_dtype"):
        open_merge(config, sources, Checkpoint.open(base)).ready(None)


TWO = [{"model": "0"}, {"model": "1"}]


@pytest.mark.parametrize(
    ("config", "words", "expected"),
    [
        (None, [], "merge.file=.* cannot be read .No such file"),
        ({"models": TWO}, [], "it has no merge_method"),
        (
            {"merge_method": "linear", "models": TWO, "tokenizer_source": "union"},
            [],
            "tokenizer_source is not possible",
        ),
        ({"merge_method": "linear", "models": TWO, "paramters": {}}, [], "paramters is not a key .*mean parameters"),
        ({"merge_method": "linear", "models": [*TWO, {"model": "2"}]}, [], "2 is not a model of it: .* 0, 1, base"),
        ({"merge_method": "linear", "models": TWO[:1]}, [], r"does not use merge.experts\[1\]: leave it out"),
        ({"merge_method": "linear", "models": [*TWO, {"model": "m+lora"}]}, [], "m.lora is an adapter on a model"),
        ({"merge_method": "ramplus_tl", "models": TWO, "dtype": "float32"}, [], "ramplus_tl gives float32 unless"),
        ({"merge_method": "linear", "models": TWO}, ["merge.dtype=float32"], "merge.dtype=float32 is not read"),
        (
            {
                "merge_method": "passthrough",
                "slices": [{"sources": [{"model": model, "layer_range": [0, 9]}]} for model in (0, 1)],
            },
            [],
            "its slices have 18 layers, the models",
        ),
        ({"merge_method": "passthrough", "slices": [{"sources": TWO}]}, [], r"needs layer_range: \[first, last \+ 1\]"),
    ],
)
def test_what_is_refused_before_a_run(
    config: Any, words: list[str], expected: str, installed: Callable[[str], None], models: dict[str, list[Path]],
    tmp_path: Path,
) -> None:  # fmt: skip
    file = tmp_path / "mine.yaml"
    if config is not None:
        write(file, config)
    with pytest.raises(PipelineError, match=expected):
        built(file, models, *words)


def test_mergekit_that_is_absent_or_old(
    installed: Callable[[str | None], None],
    models: dict[str, list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = write(tmp_path / "a.yaml", config_of("linear", ROLES))
    told = {None: "this Python does not have: .*mergekit_python=PATH", "0.1.4": "0.1.4, too old"}
    for version, words in told.items():
        installed(version)
        with pytest.raises(PipelineError, match=words):
            built(file, models)
        with pytest.raises(PipelineError, match=words.replace("this Python", "merge.mergekit_python=other")):
            built(file, models, "merge.mergekit_python=other")
    monkeypatch.undo()
    with pytest.raises(PipelineError, match="merge.mergekit_python=/nowhere cannot be run .No such file"):
        built(file, models, "merge.mergekit_python=/nowhere")
