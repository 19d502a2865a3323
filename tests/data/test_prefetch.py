"""stage=prefetch against a hub on this machine, and the table's runs with the Hub off."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import repositories
import yaml
from datasets.data_files import resolve_pattern
from fake_hub import Hub, serving
from huggingface_hub import constants

from pipeline.benchmarks import BENCHMARKS
from pipeline.commands.prefetch import data_files, fetch_url, write_lock
from pipeline.config import conf
from pipeline.config.data import Source
from pipeline.errors import PipelineError
from pipeline.hub.lock import Lock, read_lock
from pipeline.runs.find import find_run
from pipeline.runs.manifest import read_manifest

MODEL = "hub:tiny/base"
TABLE: dict[str, Any] = {
    "name": "fetched",
    "title": "A table of the test",
    "every": {"model": "trained", "model.path": MODEL},
    "runs": {
        "base": {},
        "expert": {
            "stage": "sft",
            "expert": "sw",
            "recipe": "sandbox_language",
            "data.size": 8,
            "data.allow_fewer": True,
            "sft.steps": 1,
            "sft.batch_size": 2,
            "sft.micro_batch_size": 2,
            "sft.seq_length": 96,
            "sft.warmup_steps": 0,
        },
    },
    "score": {"eval": "mgsm_2shot", "in": "sw", "eval.limit": 1, "eval.max_gen_toks": 2},
    "columns": {"base": "base", "expert": "expert"},
}
# The program with a conf/ of the test, and one language of the benchmarks, in processes of its own,
# as HF_ENDPOINT is read when huggingface_hub is imported: one with the Hub and one without, of
# which the commands are forked.
IMPORTS = (
    "import datasets, trl, lm_eval.models.huggingface, pipeline.__main__, pipeline.data.benchmarks"
)
PROGRAM = """
import sys
from pathlib import Path
from datasets import config
from pipeline.config import conf
from pipeline.data import benchmarks
config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
conf.folder = lambda: Path(sys.argv[1])
benchmarks.MGSM = ("sw",)
from pipeline import __main__
sys.exit(__main__.main(sys.argv[2:]))
"""


@dataclass
class Place:
    hub: Hub
    folder: Path
    mirror: Hub  # of files that are on no hub
    runs: Path

    def program(self, *words: str, offline: bool = False) -> SimpleNamespace:
        online = "1" if offline else "0"
        env = os.environ | {"HF_ENDPOINT": self.hub.address, "HF_HOME": str(self.folder / "home")}
        env |= {"HF_HUB_OFFLINE": online, "HF_DATASETS_OFFLINE": online, "HF_HUB_DISABLE_XET": "1"}
        env |= {"NO_PROXY": "127.0.0.1", "WANDB_MODE": "disabled"}
        env.pop("HF_TOKEN", None)
        done = forked.python("-c", *words, env=env, after=IMPORTS)
        return SimpleNamespace(status=done.returncode, out=done.stdout, err=done.stderr)

    def run(self, *words: str, offline: bool = False) -> SimpleNamespace:
        here = [f"runs_dir={self.runs}", "tracking.mode=disabled"]
        return self.program(PROGRAM, str(self.folder / "conf"), *words, *here, offline=offline)

    def lock(self) -> dict[str, Any]:
        return json.loads((self.runs / "hub.lock.json").read_text())

    @contextmanager
    def with_an_empty_cache(self, folder: Path) -> Iterator["Place"]:
        """As on another machine, with runs of its own below `folder`."""
        home, kept = self.folder / "home", self.folder / "kept"
        home.rename(kept)
        yield replace(self, runs=folder / "runs")
        shutil.rmtree(home)
        kept.rename(home)


def benchmarks(hub: Hub, folder: Path) -> None:
    """Write the benchmark sets in Swahili. A row of Inkuba repeats a question of MGSM."""
    worked = {
        "question": "Swali: Roger ana mipira 5.",
        "answer": "Jibu la Hatua kwa Hatua: 5 ni 5. Jibu ni 5.",
        "answer_number": 5,
        "equation_solution": "5",
    }
    asked = {"question": LEAKED, "answer": None, "answer_number": 18, "equation_solution": None}
    repositories.jsonl(folder / "mgsm/sw/train.jsonl", [worked] * 8)
    repositories.jsonl(folder / "mgsm/sw/test.jsonl", [asked])
    repositories.readme(
        folder / "mgsm", {"sw": {"train": "sw/train.jsonl", "test": "sw/test.jsonl"}}
    )
    options = {f"mc_answer{n}": f"jibu {n}" for n in range(1, 5)}
    repositories.jsonl(
        folder / "belebele/data/swh_Latn.jsonl",
        [{"flores_passage": "kifungu", "question": "nini?", **options}],
    )
    repositories.readme(folder / "belebele", {"swh_Latn": {"test": "data/swh_Latn.jsonl"}})
    for split in ("dev", "devtest"):
        repositories.jsonl(
            folder / f"flores_plus/{split}/swh_Latn.jsonl", [{"id": 0, "text": "sentensi"}]
        )
    repositories.readme(
        folder / "flores_plus",
        {"swh_Latn": {split: f"{split}/swh_Latn.jsonl" for split in ("dev", "devtest")}},
    )
    row = {"question": "nini?", **{f"option_{letter}": letter for letter in "abcd"}}
    repositories.parquet(folder / "Global-MMLU/sw/test-00000-of-00001.parquet", [row])
    repositories.readme(folder / "Global-MMLU", {"sw": {"test": "sw/test-*"}})
    repositories.parquet(
        folder / "mbpp/full/test-00000-of-00001.parquet",
        [{"text": "Write it.", "code": "def f(): ..."}],
    )
    repositories.readme(folder / "mbpp", {"full": {"test": "full/test-*"}})
    names = (
        "juletxara/mgsm",
        "facebook/belebele",
        "openlanguagedata/flores_plus",
        "CohereLabs/Global-MMLU",
        "google-research-datasets/mbpp",
    )
    for name in names:
        hub.push(f"datasets/{name}", folder / name.partition("/")[2])


LEAKED = (
    "Bata wa Janet hutaga mayai kumi na sita kila siku naye hula matatu kila asubuhi kwa kifungua"
    " kinywa"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("prefetch")
    shutil.copytree(conf.folder(), folder / "conf")
    with serving() as hub, serving() as mirror:
        model = folder / "model"
        shutil.copytree(
            base, model, ignore=shutil.ignore_patterns("manifest.json", "*.jsonl", "*.md")
        )
        (model / "pytorch_model.bin").write_bytes(b"a pickle")
        hub.push("models/tiny/base", model)
        benchmarks(hub, folder)
        repositories.aya(folder / "aya_dataset")
        hub.push("datasets/CohereLabs/aya_dataset", folder / "aya_dataset")
        inkuba = folder / "Inkuba-instruct"
        repositories.inkuba(inkuba)
        leaked = {
            "instruction": "Jibu.",
            "inputs": LEAKED,
            "targets": "9",
            "task": "qa",
            "data_source": "x",
        }
        whole = {
            "instruction": "Sema.",
            "inputs": "Habari",
            "targets": "Nzuri",
            "task": "qa",
            "data_source": "x",
        }
        repositories.parquet(inkuba / "data/swahili_train-00000-of-00001.parquet", [leaked, whole])
        hub.push(
            "datasets/lelapa/Inkuba-instruct", inkuba, "a417af0dd9fff92950f037857b0cfa6980cfc743"
        )
        repositories.xp3mt(folder / "xP3mt")
        hub.push("datasets/bigscience/xP3mt", folder / "xP3mt")
        repositories.raw_bitext(folder / "pairs.gz", "sw", 9)
        mirror.files["/nllb/eng_Latn-swh_Latn.gz"] = (folder / "pairs.gz").read_bytes()
        nllb = folder / "conf/data/nllb_sw.yaml"
        shipped = yaml.safe_load(nllb.read_text()) | {
            "url": f"{mirror.address}/nllb/eng_Latn-swh_Latn.gz"
        }
        nllb.write_text(yaml.safe_dump(shipped))
        (folder / "conf/tables/fetched.yaml").write_text(yaml.safe_dump(TABLE, sort_keys=False))
        yield Place(hub, folder, mirror, folder / "runs")


def test_a_table_is_fetched_locked_and_made_with_the_hub_off(place: Place) -> None:
    """plan says what is not pinned; prefetch locks it.

    The same table then runs without one request.
    """
    before = place.run("stage=plan", "table=fetched", "plan.lines=99", offline=True)
    assert before.status == 0, before.err
    missing = next(line for line in before.out.splitlines() if line.startswith("not pinned "))
    named = missing.partition(": ")[2].split(", ")
    assert {"tiny/base", "CohereLabs/aya_dataset", "bigscience/xP3mt", "juletxara/mgsm"} <= set(
        named
    )
    on_hub = [item for item in BENCHMARKS.values() if not item.built_from]
    assert len(named) == 5 + len(on_hub)  # one model, three sets and one file for training

    fetched = place.run("stage=prefetch", "table=fetched")
    assert fetched.status == 0, fetched.err
    assert fetched.out.strip() == str(place.folder / "runs/hub.lock.json")
    lock, heads = place.lock(), place.hub.heads
    assert lock["models"]["tiny/base"]["revision"] == heads["models/tiny/base"]
    assert "model.safetensors" in lock["models"]["tiny/base"]["files"]
    assert lock["models"]["tiny/base"]["dtypes"] == ["float32"]
    assert not any("pytorch_model.bin" in asked for asked in place.hub.asked)
    inkuba = lock["datasets"]["lelapa/Inkuba-instruct@a417af0dd9fff92950f037857b0cfa6980cfc743"]
    assert list(inkuba["parts"]["default/swahili_train"]["files"]) == [
        "data/swahili_train-00000-of-00001.parquet"
    ]
    xp3mt = lock["datasets"]["bigscience/xP3mt"]
    assert list(xp3mt["parts"]["sw/*.jsonl"]["files"]) == [
        "sw/xp3_GEM_xlsum_sw_train_docsummary_swmt.jsonl"
    ]
    assert len(next(iter(lock["urls"].values()))["sha256"]) == 64

    place.hub.asked.clear()
    place.mirror.asked.clear()
    after = place.run("stage=plan", "table=fetched", "plan.lines=99", offline=True)
    assert "not pinned" not in after.out
    names = [
        {
            line.split()[0]
            for line in told.out.splitlines()
            if line.startswith(("data-", "sw-", "eval-"))
        }
        for told in (before, after)
    ]
    assert (
        len(names[0]) == len(names[1]) == 4 and not names[0] & names[1]
    )  # every hash has the revisions in it

    made = place.run("stage=table", "table=fetched", offline=True)
    assert made.status == 0, made.err
    assert place.hub.asked == place.mirror.asked == []
    data = next((place.folder / "runs").glob("data-sw-*"))
    card, manifest = (data / "data_card.md").read_text(), read_manifest(data)
    assert manifest is not None
    assert (
        manifest.facts["counts"]["inkuba"]["shared"] == {"mgsm": 1}
        and "Nzuri" in (data / "train.jsonl").read_text()
    )
    nllb = manifest.facts["counts"]["nllb"]
    assert (nllb["rows"], nllb["broken"], nllb["low_score"], nllb["left"]) == (4, 1, 1, 2)
    assert f"| aya | CohereLabs/aya_dataset | {heads['datasets/CohereLabs/aya_dataset']} |" in card
    assert "Benchmark texts: belebele 2, flores 2, global_mmlu 1, mbpp 2, mgsm 1" in card


def test_a_set_from_the_hub_itself_is_that_of_the_cache(place: Place, tmp_path: Path) -> None:
    """Unlocked, over the network, past the loading script: the same rows in the same order."""
    with place.with_an_empty_cache(tmp_path) as elsewhere:
        made = elsewhere.run("stage=data", "expert=sw", "data.size=8", "data.allow_fewer=true")
    assert made.status == 0, made.err
    cached = next((place.folder / "runs").glob("data-sw-*"))
    assert (Path(made.out.strip()) / "train.jsonl").read_text() == (
        cached / "train.jsonl"
    ).read_text()
    assert "| not pinned |" in (Path(made.out.strip()) / "data_card.md").read_text()


def test_what_moves_on_the_hub_stays_locked_until_an_update(place: Place) -> None:
    locked = place.lock()["datasets"]["CohereLabs/aya_dataset"]["revision"]
    (place.folder / "aya_dataset/NEWS").write_text("a new revision")
    moved = place.hub.push("datasets/CohereLabs/aya_dataset", place.folder / "aya_dataset")
    kept = place.run("stage=prefetch", "table=fetched")
    assert kept.status == 0, kept.err
    assert place.lock()["datasets"]["CohereLabs/aya_dataset"]["revision"] == locked
    new = place.run("stage=prefetch", "table=fetched", "prefetch.update=true")
    assert new.status == 0, new.err
    entry = place.lock()["datasets"]["CohereLabs/aya_dataset"]
    assert entry["revision"] == moved and list(entry["parts"]) == ["default/train"]


def test_questions_that_move_on_the_hub_are_read_as_locked(place: Place) -> None:
    """Over the network, and offline after another program has read the newest revision."""
    newer = place.folder / "newer"
    shutil.copytree(place.folder / "mgsm", newer)
    test = newer / "sw/test.jsonl"
    test.write_text(test.read_text().replace("Bata wa Janet", "Swali jipya"))
    locked = place.lock()["datasets"]["juletxara/mgsm"]["revision"]
    moved = place.hub.push("datasets/juletxara/mgsm", newer)
    score = [
        "stage=eval",
        f"checkpoint={MODEL}",
        "eval=mgsm_2shot",
        "languages=[sw]",
        "eval.limit=1",
    ]

    def asked(*words: str, offline: bool = False) -> str:
        done = place.run(*score, *words, "redo=true", offline=offline)
        assert done.status == 0, done.err
        return next(Path(done.out.strip()).glob("samples/*")).read_text()

    assert "Bata wa Janet" in asked("eval.max_gen_toks=3")
    program = (
        "import datasets; print(datasets.load_dataset('juletxara/mgsm',"
        " 'sw')['test'][0]['question'])"
    )
    assert "Swali jipya" in place.program(program).out
    told = place.run(*score, "eval.max_gen_toks=4", offline=True)
    assert told.status == 1
    refusal = (
        f"juletxara/mgsm is locked at {locked[:8]}, but the cache of datasets gives {moved[:8]}"
    )
    assert refusal in told.err
    fetched = place.run("stage=prefetch", "table=fetched")
    assert fetched.status == 0, fetched.err
    assert "Bata wa Janet" in asked("eval.max_gen_toks=4", offline=True)


def test_what_cannot_be_fetched_is_told_and_the_rest_is_locked(
    place: Place, tmp_path: Path
) -> None:
    place.hub.gated.add("datasets/lelapa/Inkuba-instruct")
    del place.hub.repositories["datasets/bigscience/xP3mt"]
    with place.with_an_empty_cache(tmp_path) as elsewhere:
        told = elsewhere.run("stage=prefetch", "table=fetched")
    assert told.status == 1 and "Traceback" not in told.err
    assert "source inkuba (lelapa/Inkuba-instruct) is gated. Accept its terms" in told.err
    assert told.err.count(" could not be fetched: ") == 2, told.err
    assert "CohereLabs/aya_dataset" in elsewhere.lock()["datasets"]


def test_what_was_refused_or_came_in_part_is_fetched_by_the_same_command(
    place: Place, tmp_path: Path
) -> None:
    """Too many requests, and downloads that break off.

    The Hub's client asks again for a file that broke off, of the Hub or of another site.
    """
    place.hub.gated.clear()
    head = place.hub.heads["models/tiny/base"]
    nllb = "/nllb/eng_Latn-swh_Latn.gz"
    place.hub.busy = {"/api/datasets/CohereLabs/aya_dataset": 1}
    place.hub.cut, place.mirror.cut = {f"/tiny/base/resolve/{head}/model.safetensors": 1}, {nllb: 1}
    with place.with_an_empty_cache(tmp_path) as elsewhere:
        told = elsewhere.run("stage=prefetch", "table=fetched")
        assert told.status == 1 and "could not be fetched: " in told.err, told.err
        assert "Too Many Requests" in told.err
        asked = [*place.hub.busy.values(), *place.hub.cut.values(), *place.mirror.cut.values()]
        assert not any(asked)
        fetched = elsewhere.run("stage=prefetch", "table=fetched")
    assert "Too Many Requests" not in fetched.err
    lock = elsewhere.lock()
    whole = place.mirror.files[nllb]
    (entry,) = lock["urls"].values()
    assert (entry["bytes"], entry["sha256"]) == (len(whole), hashlib.sha256(whole).hexdigest())
    weights = place.hub.repositories["models/tiny/base"][head]["model.safetensors"]
    assert lock["models"]["tiny/base"]["files"]["model.safetensors"] == len(weights)


def test_a_file_that_has_changed_at_its_address_stays_locked_until_an_update(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """On another machine, where it has to be fetched again.

    A file that is there in part is fetched again too.
    """
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving() as mirror:
        mirror.files["/pairs.gz"] = b"0123456789"
        source = Source(url=f"{mirror.address}/pairs.gz", rows="nllb", file="x")
        lock = Lock(folder=tmp_path)
        fetch_url(lock, source, update=False)
        _, (file,) = lock.source(source)  # type: ignore[misc]
        locked = dict(lock.urls)
        file.write_bytes(b"0123")
        fetch_url(lock, source, update=False)
        assert file.read_bytes() == b"0123456789" and lock.urls == locked
        mirror.files["/pairs.gz"] = b"another one"
        file.unlink()
        with pytest.raises(
            PipelineError,
            match=f"{source.url} has changed since it was locked. Put the locked file",
        ):
            fetch_url(lock, source, update=False)
        assert lock.urls == locked and not file.exists()
        fetch_url(lock, source, update=True)
        assert file.read_bytes() == b"another one" and lock.urls != locked


def test_a_lock_file_holds_no_credential_and_tells_addresses_apart(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    lock = Lock(folder=tmp_path)
    with serving() as mirror:
        mirror.files["/rows.jsonl"] = b'{"prompt": "q", "completion": "a"}\n'
        first, other = (
            f"{mirror.address}/rows.jsonl?token={name}-token&X-Amz-Signature=open" for name in "ab"
        )
        for url in (first, other):
            fetch_url(lock, Source(file="x", rows="pairs", url=url, format="json"), update=False)
    write_lock(tmp_path / "lock.json", lock)
    written = (tmp_path / "lock.json").read_text() + " ".join(map(str, tmp_path.rglob("*")))
    assert not [secret for secret in ("a-token", "b-token", "=open") if secret in written]
    assert len(lock.urls) == 2 and lock.entry(Source(file="x", rows="pairs", url=other)) is not None
    plain = "https://host/a.gz"
    assert Lock(urls={plain: {"sha256": "0"}}).entry(Source(file="x", rows="pairs", url=plain)) == {
        "sha256": "0"
    }


@pytest.mark.parametrize(
    "pattern", ["sw/*.jsonl", "*/a.jsonl", "**/*.jsonl", "sw/old/[ab].jsonl", "s?/a*"]
)
def test_a_pattern_of_files_is_locked_as_it_is_read(tmp_path: Path, pattern: str) -> None:
    """As `datasets` resolves it, where nothing is locked: a star does not reach into folders."""
    for name in (
        "a.jsonl",
        "sw/a.jsonl",
        "sw/b.jsonl",
        "sw/old/a.jsonl",
        "sw/old/c.jsonl",
        "bn/a.jsonl",
    ):
        repositories.jsonl(tmp_path / name, [{"text": name}])
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl")]
    hub = SimpleNamespace(list_repo_files=lambda *_, **__: files)
    _, found = data_files(hub, Source(hub="org/set", files=pattern, rows="text", file="x"), "abc")
    read = resolve_pattern(pattern, base_path=str(tmp_path))
    assert found == sorted(Path(file).relative_to(tmp_path).as_posix() for file in read) != []


# --- the lock file ---


def test_a_locked_model_is_its_folder_in_the_cache_and_has_another_hash(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    free = find_run("hub:org/name", tmp_path, "checkpoint")
    lock = {
        "models": {"org/name": {"revision": "abc", "files": {"config.json": 2}}},
        "datasets": {},
        "urls": {},
    }
    (tmp_path / "hub.lock.json").write_text(json.dumps(lock))
    locked = find_run("hub:org/name", tmp_path, "checkpoint")
    assert free.folder == Path("org/name") and free.name == locked.name == "name"
    assert (
        locked.folder == tmp_path / "hub/models--org--name/snapshots/abc"
        and locked.hash != free.hash
    )
    with pytest.raises(
        PipelineError,
        match="org/name is locked, but config.json is not there in .*Run stage=prefetch",
    ):
        read_lock(tmp_path).check_model("org/name")
    locked.folder.mkdir(parents=True)
    (locked.folder / "config.json").write_text("{")
    with pytest.raises(PipelineError, match="config.json has 1 of 2 bytes"):
        read_lock(tmp_path).check_model("org/name")
    (locked.folder / "config.json").write_text("{}")
    read_lock(tmp_path).check_model("org/name")


def test_a_cache_half_written_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    parts = {"default/train": {"format": "parquet", "files": {"data/a.parquet": 10}}}
    lock = Lock(datasets={"org/set@1.0": {"revision": "abc", "parts": parts}})
    source = Source(hub="org/set", revision="1.0", rows="text", file="x")
    assert lock.pinned(source).revision == "abc" and lock.entry(lock.pinned(source)) is lock.entry(
        source
    )
    file = tmp_path / "datasets--org--set/snapshots/abc/data/a.parquet"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"half")
    with pytest.raises(PipelineError, match="org/set is locked, but a.parquet has 4 of 10 bytes"):
        lock.source(source)
    file.write_bytes(b"0123456789")
    found, files = lock.source(source)
    assert files == [file] and found.format == "parquet"
    other = Source(hub="org/set", rows="text", file="x")
    assert lock.pinned(other) == other and lock.source(other) == (other, None)
