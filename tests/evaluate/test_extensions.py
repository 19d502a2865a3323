"""Merge methods of other packages.

Three examples, built and unpacked as pip would; and broken ones.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from as_torch import as_torch
from fixture_types import Make

from pipeline.__main__ import main
from pipeline.config import extensions
from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.launch.plan_file import Task
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import describe_changes
from pipeline.stages.rows import build

PACKAGES = Path(__file__).parents[1] / "packages"
BUILD = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a folder with the packages as they are installed."""
    place = tmp_path_factory.mktemp("installed")
    for package in sorted(PACKAGES.iterdir()):
        copy = place / "sources" / package.name
        shutil.copytree(package, copy)
        subprocess.run([sys.executable, "-c", BUILD, str(copy)], cwd=copy, check=True)
        (wheel,) = copy.glob("*.whl")
        ZipFile(wheel).extractall(place / "site")
    return place / "site"


def forget() -> None:
    """Forget what a process has read of installed packages."""
    extensions.extensions.cache_clear()
    for name in [name for name in sys.modules if name.startswith("example_")]:
        del sys.modules[name]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    def installed(site: Path) -> None:
        monkeypatch.syspath_prepend(site)
        forget()

    yield installed
    monkeypatch.undo()
    forget()


def merge_words(models: dict[str, list[Path]], *more: str) -> list[str]:
    base, math, language = models["llama"]
    return ["stage=merge", f"merge.experts=[{math},{language}]", f"merge.base={base}", *more]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_an_elementwise_method(
    built: Path, install: Callable[[Path], None], models: dict[str, list[Path]], make_run: Make
) -> None:
    install(built)
    folder = make_run(*merge_words(models, "merge=largest"))
    base, math, language = map(tensors, models["llama"])
    for name, tensor in tensors(folder).items():
        changes = [expert[name].float() - base[name].float() for expert in (math, language)]
        larger = torch.where(changes[1].abs() > changes[0].abs(), changes[1], changes[0])
        assert torch.equal(tensor, (base[name].float() + larger).bfloat16()), name
    manifest = read_manifest(folder)
    assert manifest and manifest.decided_by["packages"] == {"largest": "example-largest 1.0"}


def test_a_method_with_a_knob(
    built: Path,
    install: Callable[[Path], None],
    models: dict[str, list[Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    from pipeline.merge.stage import merge_of

    install(built)
    base, math, language = map(tensors, models["llama"])
    run = build(compose(merge_words(models, "merge=clipped", "merge.most=0.02", "merge.scale=0.5")))  # type: ignore[arg-type]
    merge = merge_of(run)
    for name in merge.names:
        changes = [
            (expert[name].float() - base[name].float()).clamp(-0.02, 0.02)
            for expert in (math, language)
        ]
        assert torch.equal(
            as_torch(merge, name), (base[name].float() + 0.5 * (changes[0] + changes[1])).bfloat16()
        )
    assert (
        Task(**json.loads(json.dumps(vars(Task.of(run))))).run().hash == run.hash
    )  # as another process reads it
    assert build(compose(merge_words(models, "merge=clipped"))).hash != run.hash  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="merge.most must be above 0, got -1"):
        compose(merge_words(models, "merge=clipped", "merge.most=-1"))
    with pytest.raises(PipelineError, match="unknown key merge.mots: did you mean merge.most"):
        compose(merge_words(models, "merge=clipped", "merge.mots=1"))
    assert main(["stage=merge", "merge=clipped", "--help"]) == 0
    assert "merge.most=0.01                    size of an entry [> 0]" in capsys.readouterr().out


def test_dare(built: Path, install: Callable[[Path], None], models: dict[str, list[Path]]) -> None:
    """About half of the entries are kept, times two, of each expert others.

    None or all of them in task arithmetic.
    """
    from pipeline.merge.stage import merge_of

    install(built)
    base, math, _ = map(tensors, models["llama"])

    def merged(*words: str) -> torch.Tensor:
        of = ["merge.dtype=float32", "merge.weights=[1.0,0.0]", *words]
        return as_torch(merge_of(build(compose(merge_words(models, *of)))), name)  # type: ignore[arg-type]

    for name in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"):
        change = math[name].float() - base[name].float()
        dropped = merged("merge=dare_linear") - base[name].float()
        kept = dropped.abs() > change.abs()
        torch.testing.assert_close(dropped, 2 * change * kept, rtol=1e-3, atol=1e-5)
        assert abs(kept[change != 0].float().mean() - 0.5) < 5 * 0.5 / kept.numel() ** 0.5
        assert torch.equal(merged("merge=dare_linear"), merged("merge=dare_linear"))
        assert torch.equal(
            merged("merge=dare_linear", "merge.density=1"), merged("merge=task_arithmetic")
        )


def test_the_version_is_of_the_hash(
    built: Path, install: Callable[[Path], None], models: dict[str, list[Path]], tmp_path: Path
) -> None:
    later = tmp_path / "site"
    shutil.copytree(built, later)
    (info,) = later.glob("example_largest-*.dist-info")
    (info / "METADATA").write_text(
        (info / "METADATA").read_text().replace("Version: 1.0", "Version: 1.1")
    )
    decided = []
    for site in (built, later):
        install(site)
        decided.append(build(compose(merge_words(models, "merge=largest"))).decided_by)  # type: ignore[arg-type]
    assert describe_changes(*decided) == ["packages.largest example-larg -> example-larg"]
    assert decided[1]["packages"] == {"largest": "example-largest 1.1"}
    assert (
        "packages"
        not in build(compose(merge_words(models, "merge=soup", "merge.base=null"))).decided_by
    )  # type: ignore[arg-type]


# --- what is broken ---

METHOD = """
from dataclasses import dataclass
from pipeline.merge.task_vectors import TaskVectors
import numpy as np

@dataclass
class Mine(TaskVectors):
    method: str = "broken"

    def change(self, vectors, name, start):
        return vectors[0]
"""


def write_broken(site: Path, source: str, group: str = "merge_methods") -> Path:
    info = site / "example_broken-0.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example-broken\nVersion: 0.9\n")
    (info / "entry_points.txt").write_text(
        f"[cross_lingual_merging.{group}]\nbroken = example_broken:Mine\n"
    )
    (site / "example_broken.py").write_text(source)
    return site


def test_packages_are_listed_and_not_imported_until_used(
    install: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(write_broken(tmp_path / "site", "raise SystemExit('imported')"))
    assert main(["--help"]) == 0
    assert re.search(
        r"merge= .*\badaptive_swap, broken, dare, layer_swap, ", capsys.readouterr().out
    )
    compose(["stage=merge", "merge=soup", "merge.experts=[a,b]"])
    with pytest.raises(PipelineError, match="merge=soupe is not an option: did you mean soup"):
        compose(["stage=merge", "merge=soupe", "merge.experts=[a,b]"])
    assert "example_broken" not in sys.modules
