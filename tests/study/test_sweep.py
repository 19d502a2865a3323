"""A merge scored without being written, and a grid of them: the scores of the written merges, by the same hash."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Call, Make, Patch
from tiny_words import FEW

from pipeline.commands.sweep import parse_shard
from pipeline.errors import PipelineError
from pipeline.evaluate import stage
from pipeline.evaluate.model import Answering
from pipeline.stats.statistics import split_half

ASKED = ["eval=sandbox", "eval.max_gen_toks=4", "eval.limit=3", "languages=[en,qac]"]


@pytest.fixture(scope="module")
def experts(math_expert: Path, language_expert: Path) -> list[str]:
    experts = [f"merge.math={math_expert}", f"merge.language={language_expert}"]
    return ["merge=layer_swap", *experts, "merge.bottom_layers=3"]


@pytest.fixture
def expert(make_run: Make, world: Path, base: Path, math_expert: Path, language_expert: Path) -> Callable[[str], Path]:
    """MATH and LANGUAGE, and LORA_MATH and LORA_LANGUAGE, which are adapters on the same base."""

    def named(name: str) -> Path:
        if not name.startswith("LORA_"):
            return {"MATH": math_expert, "LANGUAGE": language_expert}[name]
        start = ["model=trained", f"model.path={base}", f"data_root={world}", "sft=lora", *FEW]
        of = {"LORA_MATH": "math", "LORA_LANGUAGE": "qac"}[name]
        return make_run("stage=sft", *start, f"expert={of}", f"recipe=sandbox_{'math' if of == 'math' else 'language'}")

    return named


def answers(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "samples").glob("*.jsonl"))}


def test_a_sweep_loads_one_model_and_its_points_are_found_by_their_recipe(
    make_run: Make, call: Call, runs_dir: Path, world: Path, experts: list[str], monkeypatch: Patch
) -> None:
    from pipeline.merge import live

    loads, real = [], live._load_live
    monkeypatch.setattr(live, "_load_live", lambda *words: loads.append(1) or real(*words))
    grid = ["sweep.bottom_layers=[2,3]", "sweep.top_layers=[0,1]"]
    words = ["stage=sweep", *experts, *grid, *ASKED, f"data_root={world}"]
    words += [f"runs_dir={runs_dir}", "tracking.mode=disabled"]
    half = call(*words, "sweep.shard=1/2", status=0)
    page = Path(half.out.strip())
    assert page.name == "index.html" and "points finished" in page.read_text() and len(loads) == 1
    assert call(*words, status=0).out == half.out and len(loads) == 2 and "4 of 4 points" in page.read_text()
    assert "--accent" in page.read_text()  # in the dress of a table's page
    told = ["<svg", " questions in ", "Best of 4", "Chosen on odd questions", "Split-half score", "bottom_layers = "]
    for text in (*told, "Of translations a score is the mean chrF++ of sentences"):
        assert text in page.read_text(encoding="utf-8")
    rows = list(csv.DictReader((page.parent / "scores.csv").open()))
    assert [row["bottom_layers"] + row["top_layers"] for row in rows] == ["20", "21", "30", "31"]
    # each point is the run that stage=eval merge=... makes, and equals the evaluation of the written merge
    point = rows[2]
    swap = make_run("stage=merge", *experts, "merge.top_layers=0")
    written = make_run("stage=eval", f"checkpoint={swap}", *ASKED, f"data_root={world}", "redo=true")  # not found again
    monkeypatch.setattr(stage, "open_model", None)  # nothing is loaded for what is finished
    alone = make_run("stage=eval", *experts, "merge.top_layers=0", *ASKED, f"data_root={world}")
    assert alone.name == point["run"] and answers(alone) == answers(written)
    assert call(*words).status == 0 and len(loads) == 3  # the written one, too, stayed for all its tasks


def scored_again(folder: Path) -> list[str]:
    harness = json.loads((folder / "scores.json").read_text())["harness"]
    return [name for part in harness["parts"].values() for name in part["found_again"]]


@pytest.fixture
def requests(monkeypatch: Patch) -> list[int]:
    """How many requests each call to a model brought, whatever model it was."""
    counted: list[int] = []
    for method in ("loglikelihood", "generate_until"):
        real = getattr(Answering, method)

        def count(self: Any, asked: list[Any], *words: Any, real: Any = real, **more: Any) -> Any:
            counted.append(len(asked))
            return real(self, asked, *words, **more)

        monkeypatch.setattr(Answering, method, count)
    return counted


SWAP = ["merge=layer_swap", "merge.bottom_layers=2", "merge.top_layers=2"]
EVALUATED = ["eval=mgsm_0shot", "eval.max_gen_toks=4", "eval.limit=3", "languages=[en,qac]"]


@pytest.mark.parametrize(
    ("recipe", "dtype", "questions"),
    [
        ([*SWAP, "merge.math=MATH", "merge.language=LANGUAGE"], "bfloat16", 2),
        (["merge=soup", "merge.experts=[MATH,LANGUAGE]", "merge.dtype=bfloat16"], "auto", 3),
        (["merge=ties", "merge.experts=[MATH,LANGUAGE]", "merge.density=0.3"], "auto", 3),
        (["merge=soup", "merge.experts=[LORA_MATH,LORA_LANGUAGE]"], "auto", 3),
    ],
    ids=["layer swap", "soup as bfloat16", "ties", "adapters"],
)
def test_a_merge_in_memory_and_the_written_one_are_scored_once(
    make_run: Make,
    world: Path,
    expert: Callable[[str], Path],
    requests: list[int],
    recipe: list[str],
    dtype: str,
    questions: int,
) -> None:
    words = [re.sub(r"(LORA_)?(MATH|LANGUAGE)", lambda name: str(expert(name[0])), word) for word in recipe]
    asked = [*EVALUATED, f"eval.limit={questions}", f"eval.dtype={dtype}", f"data_root={world}"]
    in_memory = make_run("stage=eval", *words, *asked)
    assert sum(requests) == 2 * questions and scored_again(in_memory) == []
    written = make_run("stage=eval", f"checkpoint={make_run('stage=merge', *words)}", *asked)
    assert sum(requests) == 2 * questions and scored_again(written) == ["mgsm_en_0shot", "mgsm_qac_0shot"]
    assert answers(written) == answers(in_memory) and written != in_memory


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "stage=sweep needs values"),
        (["sweep.density=[0.1]"], "sweep.density: merge=layer_swap has no such knob; it has bottom_layers,"),
        (["sweep.bottom_layers=[3,3]"], "names a value twice"),
        (["sweep.bottom_layers=[3]", "sweep.shard=5/4"], "the i-th of n shards, i from 1 to n (1/4 to 4/4)"),
        (["sweep.bottom_layers=[3,12]"], "the model has 14: lower them"),
    ],
)
def test_sweeps_that_are_refused_before_anything_is_scored(
    words: list[str],
    expected: str,
    call: Call,
    runs_dir: Path,
    experts: list[str],
    world: Path,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(stage, "make", None)
    asked = ["stage=sweep", *experts, "merge.top_layers=3", *ASKED, f"data_root={world}", f"runs_dir={runs_dir}"]
    told = call(*asked, *words, "tracking.mode=disabled")
    assert told.status == 1 and told.out == "" and expected in told.err and "Traceback" not in told.err


def test_shards_cover_the_grid_once() -> None:
    points = list(range(7))
    parts = [points[i::n] for i, n in (parse_shard(f"{i}/3") for i in (1, 2, 3))]
    assert sorted(sum(parts, [])) == points
    for text in ("0/3", "4/3", "1", "a/b", "1/0"):
        with pytest.raises(PipelineError, match="write i/n"):
            parse_shard(text)


def test_split_halves_by_hand() -> None:
    """Two configurations, two tasks: the first is best on odd questions (2 of 2 tasks), the second on even ones."""
    first = [[1.0, 0.0, 1.0, 0.0], [1.0, 0.0]]
    second = [[0.0, 1.0, 0.0, 0.0], [0.0, 1.0]]
    assert split_half([first, second]) == [(0, 0.0), (1, 0.0)]
    good = [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0]]
    assert split_half([second, good]) == [(1, 0.75), (0, 0.0)]
    assert split_half([[[1.0]], [[0.0]]]) == []
