"""What a run is: its hash, and the name of its folder."""

import copy
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import pytest

from pipeline.config.compose import compose, stage_of
from pipeline.config.data import World
from pipeline.config.knob import is_hashed
from pipeline.config.overrides import values_of
from pipeline.config.stages import RunStage
from pipeline.files import content_hash
from pipeline.runs.run import External, Run
from pipeline.stages.rows import build
from pipeline.stages.training import with_tokenizer

HASHES = Path(__file__).parents[1] / "hashes.json"


FULL = {  # a stage or a merge -> words
    "data": "expert=math data.size=5",
    "cpt": "expert=gsm8k_text model=small_bpe recipe=smoke",
    "sft": "expert=math sft.separator=x",
    "layer_swap": "stage=merge merge=layer_swap merge.math=hub:a/b merge.language=hub:a/c",
    "soup": "stage=merge merge=soup merge.experts=[hub:a/b,hub:a/c] merge.weights=[0.5,0.5]",
    "ties": "stage=merge merge=ties merge.experts=[hub:a/b,hub:a/c]",
    "eval": "eval=mgsm_2shot checkpoint=hub:a/b eval.dtype=float32",
}


def full(name: str) -> RunStage:
    """Return a configuration with a value in each part."""
    words = FULL[name].split()
    config: Any = compose(words if words[0].startswith("stage=") else [f"stage={name}", *words])
    if name == "data":
        config.expert.world = World()
    return config


def leaves(
    config: Any, path: tuple[Any, ...] = (), hashed: bool = True
) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
    """(path, type, whether it decides results) of each field, and of those inside it."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        value, counts = getattr(config, item.name), hashed and is_hashed(item, config)
        here = (*path, item.name)
        inside = [((), value)]
        inside += (
            [((key,), inner) for key, inner in value.items()] if isinstance(value, dict) else []
        )
        inside += (
            [((key,), inner) for key, inner in enumerate(value)] if isinstance(value, list) else []
        )
        parts = [(key, inner) for key, inner in inside if is_dataclass(inner)]
        for key, inner in parts:
            yield from leaves(inner, here + key, counts)
        if not parts:
            yield here, hints[item.name], counts


def other(value: Any, hint: Any) -> Any:
    """Another value of the same type."""
    if value is None:
        hint = get_args(hint)[0] if isinstance(hint, UnionType) else hint
        return {int: 7, float: 0.7, str: "other"}.get(hint) or [0.7]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, value[0] if value else "other"]
    return {**value, "other": 1} if isinstance(value, dict) else value + "other"


def put(config: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """Return a copy of the config with one value changed."""
    config = copy.deepcopy(config)
    node = config
    for key in path[:-1]:
        node = node[key] if isinstance(node, dict | list) else getattr(node, key)
    setattr(node, path[-1], change(getattr(node, path[-1])))
    return config


@pytest.mark.parametrize("name", FULL)
def test_the_hash_changes_exactly_with_what_decides_results(name: str) -> None:
    config = full(name)
    was, seen = Run(config, "x", version=1).hash, set()
    for path, hint, hashed in leaves(config):
        if path[-1] == "stage":
            continue
        changed = Run(
            put(config, path, lambda value, hint=hint: other(value, hint)), "x", version=1
        ).hash
        assert (changed != was) == hashed, ".".join(map(str, path))
        assert not hashed or changed not in seen, f"{path} is confused with another field"
        seen.add(changed if hashed else None)
    assert len(seen) > 3


def test_names_and_places_of_a_data_run_are_free() -> None:
    """Of trainings, merges and evaluations tests/test_knobs.py lists what is hashed."""
    unhashed = {".".join(map(str, path)) for path, _, hashed in leaves(full("data")) if not hashed}
    free = (
        "runs_dir redo launcher.name threads group data_root expert.name expert.side"
        " expert.sources.orca_math.paper"
    )
    assert set(free.split()) <= unhashed


@pytest.mark.parametrize(
    ("words", "change", "reader"),
    [
        (FULL["layer_swap"], "seed=3", None),
        (FULL["soup"], "deterministic=true", None),
        ("stage=eval eval=mgsm_2shot checkpoint=hub:a/b", "seed=3", None),
        ("stage=eval eval=mgsm_2shot checkpoint=hub:a/b", "deterministic=true", None),
        ("stage=data expert=math", "deterministic=true", None),
        ("stage=sft expert=math", "sft.parallel=fsdp2", "sft.processes=4"),
        ("stage=sft expert=math sft.template=chat", "sft.separator=x", "sft.template=plain"),
        ("stage=sft expert=math", "deterministic=true", ""),
        ("stage=data expert=math", "seed=3", ""),
    ],
)
def test_a_knob_that_nothing_reads_is_free(words: str, change: str, reader: str | None) -> None:
    """As in a table, whose `every` reaches runs that do not read it; alone it is refused.

    Reader: the words with which it is read, and hashed.
    """

    def hash_of(*more: str) -> str:
        found = dict(word.split("=", 1) for one in (words, *more) for word in one.split())
        return build(stage_of(values_of([f"{key}={value}" for key, value in found.items()]))).hash  # type: ignore[arg-type]

    if reader != "":
        assert hash_of(change) == hash_of()
    if reader is not None:
        assert hash_of(reader, change) != hash_of(reader)


def test_adapters_without_a_recipe_have_the_rate_of_the_papers_adapters() -> None:
    def rate_of(*words: str) -> float:
        return build(compose(["stage=sft", "expert=math", *words])).config.sft.learning_rate  # type: ignore[arg-type,no-any-return]

    of_paper = rate_of("sft=lora", "recipe=unreasonable_lora", "model=qwen2.5_7b_instruct")
    assert rate_of("sft=lora") == rate_of("sft=partial_lora", "partition=B") == of_paper == 6e-5
    assert rate_of("recipe=default") == rate_of("sft=lora", "sft.learning_rate=1e-6") == 1e-6
    assert rate_of("sft=lora", "recipe=layer_swapping_math_1") == rate_of(
        "recipe=layer_swapping_math_1"
    )


def test_the_tokenizer_of_a_data_root_is_known_by_all_its_files(tmp_path: Path) -> None:
    """transformers reads its chat template from a file of its own."""
    (tmp_path / "d/tokenizer").mkdir(parents=True)
    (tmp_path / "d/tokenizer/tokenizer.json").write_text("{}")
    hashes = [with_tokenizer(tmp_path / "d").hash]
    assert hashes == [content_hash([tmp_path / "d/tokenizer/tokenizer.json"], tmp_path / "d")]
    for template in ("{{ messages }}", "{{ messages[0] }}"):
        (tmp_path / "d/tokenizer/chat_template.jinja").write_text(template)
        hashes.append(with_tokenizer(tmp_path / "d").hash)
    assert len({*hashes}) == 3


def test_parents_and_the_version_are_in_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    config = full("layer_swap")
    parents = {role: External("n", role * 9, Path("x")) for role in ("math", "language")}
    one = Run(config, "x", dict(parents), version=1)
    swapped = Run(
        config, "x", {"math": parents["language"], "language": parents["math"]}, version=1
    )
    renamed = Run(
        config,
        "x",
        {**parents, "math": replace(parents["math"], name="m", folder=Path("y"))},
        version=1,
    )
    assert (
        one.hash != swapped.hash
        and one.hash == renamed.hash
        and one.hash != Run(config, "x", version=1).hash
    )
    assert replace(one, version=2).hash != one.hash


def test_ten_committed_configs_keep_their_hashes() -> None:
    """Where this fails, finished runs are orphaned. A new file: PIPELINE_WRITE_VALUES=1."""
    kept = json.loads(HASHES.read_text())
    assert len(kept) == 10
    found = {words: build(compose(words.split())).hash for words in kept}  # type: ignore[arg-type]
    if os.environ.get("PIPELINE_WRITE_VALUES"):
        HASHES.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(HASHES.read_text())
