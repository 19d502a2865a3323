"""README and docs/: each command is run as it is printed, in a smaller small world.

What needs the Hub, a GPU or Slurm is composed and planned. Links lead somewhere, and each knob that
a page names exists.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixture_types import Call
from reader import PAGES, ROOT, Shell, blocks, commands, planned, write_files
from small_world.files import World, pack

import pipeline
from pipeline.config import conf
from pipeline.config.compose import compose
from pipeline.config.manual import manual_text
from pipeline.config.stages import RunStage
from pipeline.data import small_world
from pipeline.stages.rows import build

README, *DOCS = PAGES
TUTORIAL = ROOT / "docs/tutorial.md"  # its variables are used by the other pages
DOCS.sort(
    key=lambda page: page.name in ("reports.md", "export.md")
)  # of tables that other pages make
WITH_COMMANDS = [
    page
    for page in DOCS
    if page != TUTORIAL
    and any(block.language == "bash" and not block.info for block in blocks(page))
]
PLANNED = [
    (page, line)
    for page in PAGES
    for block in blocks(page)
    if block.info == "plan"
    for line in commands(block)
]
PLANNED.sort(key=lambda one: len(one[1].split()), reverse=True)


# --- run ---


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a reader's folder with a smaller world, base, recipes and tables.

    The commands stay the same.
    """
    copy, base = (
        tmp_path_factory.mktemp("smaller") / "conf",
        tmp_path_factory.mktemp("base") / "narrow",
    )
    shutil.copytree(conf.folder(), copy)
    narrow_base(base)

    def change(name: str, edit: Callable[[Any], object]) -> None:
        head, text = "", (copy / name).read_text(encoding="utf-8")
        if text.startswith("# @package"):
            head = text[: text.index("\n") + 1]
        found = yaml.safe_load(text)
        edit(found)
        (copy / name).write_text(head + yaml.safe_dump(found, sort_keys=False), encoding="utf-8")

    def world(expert: Any) -> None:
        expert["world"] = {"items": 2}

    def few(table: Any) -> None:
        table["axes"] |= {
            "counts": {"1+0": {"bottom": 1, "top": 0}, "2+0": {"bottom": 2, "top": 0}},
            "density": [0.2],
        }
        table["columns"] = {
            name: of for name, of in table["columns"].items() if of["task"] in ("mgsm", "belebele")
        }
        table["rows"]["layer swap"]["by"]["eval.max_gen_toks"] = 8

    archive = tmp_path_factory.mktemp("small") / "small_world.tar.xz"
    pack(archive, World(items=2, dev_items=2, math_rows=450, language_rows=450, documents=400))
    change("expert/sandbox.yaml", world)
    change("expert/sandbox_items.yaml", lambda expert: expert.update(items={"dev": 2, "test": 2}))
    change("model/sandbox.yaml", lambda model: model.update(path=str(base)))
    few_steps = {
        "batch_size": 32,
        "micro_batch_size": 32,
        "steps": 10,
        "warmup_steps": 2,
        "epochs": 9,
    }
    for path in (copy / "recipe").glob("sandbox_*.yaml"):
        change(f"recipe/{path.name}", lambda recipe: recipe.update(few_steps))
    change("tables/sandbox.yaml", few)
    change("eval/sandbox.yaml", lambda evaluation: evaluation.update(max_gen_toks=8))
    change("launcher/local.yaml", lambda launcher: launcher.update(workers=1))
    patch = pytest.MonkeyPatch()
    patch.setattr(conf, "folder", lambda: copy)
    patch.setattr(small_world, "ARCHIVE", archive)
    patch.setenv("WANDB_MODE", "disabled")
    folder = tmp_path_factory.mktemp("reader")
    patch.chdir(folder)
    yield folder
    patch.undo()


def narrow_base(folder: Path) -> None:
    """Write the shipped base with its depth and tokenizer, but narrow and random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shipped = Path(pipeline.__file__).parent / "data/sandbox_base"
    shutil.copytree(
        shipped, folder, ignore=shutil.ignore_patterns("manifest.json", "*.safetensors")
    )
    narrow = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = AutoConfig.from_pretrained(shipped)
    config.update(narrow | {"head_dim": 16})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def kept() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def plans() -> list[set[str]]:
    """Return the words of the printed plans; many commands ask for the same plan."""
    return []


@pytest.fixture
def variables(kept: dict[str, str], smaller: Path, call: Call) -> dict[str, str]:
    """Return the tutorial's variables, once its commands have run."""
    if not kept:
        write_files(README, smaller)
        type_all(TUTORIAL, Shell(call, kept), smaller)
    return kept


def type_all(page: Path, shell: Shell, folder: Path) -> None:
    write_files(page, folder)
    for block in blocks(page):
        if block.language == "bash" and not block.info:
            for command in commands(block):
                shell.run(command)


def test_the_tutorial(smaller: Path, variables: dict[str, str]) -> None:
    assert set(variables) == {"WORLD", "MATH", "LANGUAGE", "SWAP"}
    for name in variables.values():
        assert (smaller / name / "manifest.json").is_file()


def test_the_study_of_readme_runs(smaller: Path, variables: dict[str, str], call: Call) -> None:
    """Its two CSV files and its world are made by the tutorial."""
    told = call(
        "stage=table", "table=./mine.yaml", "every.sft.steps=4", "every.sft.epochs=4", status=0
    )
    assert told.out.strip().endswith("runs/reports/mine/index.html")


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_a_page(page: Path, smaller: Path, variables: dict[str, str], call: Call) -> None:
    shell = Shell(call, dict(variables))
    type_all(page, shell, smaller)


# --- composed and planned ---


@pytest.mark.parametrize(
    ("page", "command"), PLANNED, ids=lambda one: one.name if isinstance(one, Path) else one[19:60]
)
def test_what_needs_more_than_this_machine_is_planned(
    page: Path,
    command: str,
    smaller: Path,
    variables: dict[str, str],
    plans: list[set[str]],
    call: Call,
) -> None:
    """A run is composed and built, down to its hash; of a table the plan is printed.

    RUN is an expert of README.
    """
    write_files(page, smaller)
    for file in ("gsm8k/train.jsonl", "mgsm/en/train.jsonl"):
        (smaller / "DIR" / file).parent.mkdir(parents=True, exist_ok=True)
        (smaller / "DIR" / file).write_text('{"question": "1 + 1?", "answer": "2 #### 2"}\n')
    for words in planned(command):
        for name in ("MATH", "LANGUAGE"):
            words = re.sub(r"\bRUN\b", variables[name], "\0".join(words), count=1).split("\0")
        config = compose(words)
        if isinstance(config, RunStage):
            assert len(build(config).hash) == 64, words
            continue
        if not getattr(config, "table", None) or getattr(config, "checkpoint", None):
            continue  # a sweep, or the export of a model: no plan comes before it
        asked = [word for word in words if not word.startswith(("stage=", "prefetch.", "export."))]
        own = {page.name if "table=./" in command else "", *asked}
        if any(own <= seen for seen in plans):
            continue
        plans.append(own)
        told = call("stage=plan", *asked)
        # DIR has few files, few disks hold 8B's snapshots, and org is nobody's
        allowed = (
            "needs? up to|data_root=DIR has no mgsm/|[Tt]rainings write .* [GT]B|hub:org/.* cannot be"
            " reached"
        )
        named = re.search(allowed, told.err)
        assert told.status == 0 or named, told.err
        assert re.search(r"[\d,]+ runs?, [\d,]+ done\.", told.out), told.out


# --- what pages name ---


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@cache
def knobs() -> set[str]:
    """Return the keys of all knobs of stages and merge methods."""
    asked = [[f"stage={stage}"] for stage in conf.options("stage")]
    asked += [["stage=merge", f"merge={method}"] for method in conf.options("merge")]
    text = "\n".join(manual_text(words) for words in asked)
    return set(re.findall(r"^  ([a-z]+\.[a-z_0-9.]+)=", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_knobs_that_a_page_names_exist(page: Path) -> None:
    known = knobs()
    groups = {key.partition(".")[0] for key in known} - {"expert"}
    text = re.sub(r"\]\([^)]*\)", "", page.read_text(encoding="utf-8"))
    named = re.findall(r"(?<![\w/.])([a-z]+\.[a-z_0-9]+)(?=[=`{ ,:)]|\.[a-z])", text)
    wrong = {key for key in named if key.partition(".")[0] in groups and key not in known}
    assert not {key for key in wrong if not key.endswith((".md", ".py", ".json", ".yaml"))}, wrong


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_the_scripts_and_make_targets_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for script, options in re.findall(r"(?:python |`)(scripts/\w+\.py)([^`\n]*)", text):
        source = (ROOT / script).read_text(encoding="utf-8")
        for option in re.findall(r"--(\w+)", options):
            assert f'"--{option}"' in source, f"{script} --{option}"


def words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


def test_pages_are_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert words(README) <= 650
    assert len(re.findall(r"^## ", text, re.MULTILINE)) >= 8
    demo = next(block for block in blocks(README) if block.language == "text")
    assert demo.text.endswith("runs/reports/sandbox/index.html\n")
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert sum(map(words, pages)) <= 14_000
    howto = [page for page in pages if page.parent.name == "howto"]
    assert len(howto) == 10 and all(words(page) <= 250 for page in howto)


def test_each_stage_is_on_the_page_of_commands() -> None:
    text = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    for stage in conf.options("stage"):
        assert re.search(rf"^\| `{stage}` ", text, re.MULTILINE), f"commands.md lacks {stage}"
