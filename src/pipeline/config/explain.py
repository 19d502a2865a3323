"""Sentences about a wrong key, option or type, with the remedy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import ValidationError

from pipeline.config import conf
from pipeline.config.harness_tasks import harness_index, split_shots
from pipeline.config.knob import BOUNDS, adapter, names_of
from pipeline.errors import PipelineError, close_matches, first_few

T = TypeVar("T")
Extra = Literal["forbid", "ignore"]  # treatment of keys that a dataclass does not have
TYPES = {  # the beginning of pydantic's name of an error -> the expected type
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
}


# the replacement of an option that stood for a task in each language
LANGUAGES = (
    "name the task of each language: eval={0}, and in a study benchmarks: [{{mine: {{sw: {0}}}}}]"
)
REMOVED = {  # the replacement of a stage or option of an earlier version
    "stage=check": (
        "run stage=table table=node_check hardware=NAME, which trains, merges and scores for a few"
        " steps"
    ),
    "stage=search": (
        "choose with best: in a table, or with an optimizer over pipeline.api"
        " (docs/reference/merging.md)"
    ),
    "stage=sweep": "give a table an axis for each knob, or several values with -m",
    "expert=sandbox_text_last": "recipe=sandbox_language sft=partial partition=B stands for it",
    "analyze.compare_unlike": "each map names the dtype and the optimizer of its expert",
    "plan.keys": "every.KEY=VALUE with stage=plan shows which runs are no longer cached",
    "plan.prompts": "an evaluation measures its prompts before it loads the weights",
    "export.format=lm_eval": "answers.parquet and results.csv of the report have the same answers",
    "export.format=csv": "the folder of the report has cells.csv",
    "export.format=figures": "the folder of the report has plots/scores.svg",
    "export.format=markdown": "the folder of the report has cells.md",
    "show.samples": "samples/ in the folder of a run of stage=eval has the answers as JSON lines",
    "export.private": "hf upload ORG/NAME FOLDER --private publishes an exported folder",
    "report.fewer": "stage=report always writes the page of what is finished now",
    "merge=ties_mergekit": "merge=mergekit runs any method of mergekit",
    "merge=ties_peft": "merge=ties is the paper's definition",
    "eval=afrimgsm": LANGUAGES.format("afrimgsm_swa_prompt_1"),
    "eval=global_piqa": LANGUAGES.format("global_piqa_nonparallel_cloze_swh_latn"),
    "eval=mmlu_prox": LANGUAGES.format("mmlu_prox_sw"),
    "eval=xcopa": LANGUAGES.format("xcopa_sw"),
    "merge.trim": "merge=ties trims the whole model; merge=mergekit trims each tensor",
    "merge.ties_at_threshold": (
        "merge=ties keeps all entries at the threshold; merge=mergekit keeps exactly as many"
    ),
    "merge.weigh": "merge=ties weighs after the election of signs; merge=mergekit before it",
    "merge.divisor": (
        "merge=ties divides by the number of experts that agree; merge=mergekit by their weights"
    ),
    "merge.vocabulary": (
        "mergekit-tokensurgeon transplants a vocabulary; padding of embeddings needs no key"
    ),
    "sft.padding_free": (
        "the rows of a step are sorted by length, so micro-batches have hardly any padding;"
        " sft.packing=true joins plain text"
    ),
    "merge.zero_sum": "merge=ties elects the sign of the majority where the sum is 0",
}


# pydantic's names of errors about a value of the right type
OUTSIDE = (
    "greater_than_equal",
    "greater_than",
    "less_than_equal",
    "less_than",
    "string_pattern_mismatch",
)


def removed_text(word: str) -> str:
    return f"{word} was removed in 0.2.0: {REMOVED[word]}"


def unknown_key(key: str, names: Collection[str], inside: Collection[str] = ()) -> str:
    """Return a message about an unknown key: the close known keys, or the first ones.

    Args:
        key: the unknown key.
        names: the known keys.
        inside: keys of the command's parts, such as sft.epochs, which are close if their last names
            are.
    """
    if key in REMOVED:
        return removed_text(key)
    parent, dot, last = key.rpartition(".")
    last_names = [name.rpartition(".")[2] for name in inside]
    close = close_matches(last, [*names, *last_names])
    if close:
        matches = []
        for name in names:
            if name in close:
                matches.append(parent + dot + name)
        for name in inside:
            if name.rpartition(".")[2] in close:
                matches.append(name)
        return f"unknown key {key}: did you mean {' or '.join(matches)}?"
    return f"unknown key {key}: there are {listed(names)}"


def listed(names: Collection[str]) -> str:
    """Return up to five names, and how to list all."""
    text = first_few(list(names), 5)
    if len(names) > 5:
        text += " (--help lists all)"
    return text


def unknown_option(group: str, option: str) -> str:
    word = f"{group}={split_shots(option)[0]}"
    if word in REMOVED:
        return removed_text(word)
    names = conf.options(group)
    close = close_matches(option, names, cutoff=0.5)
    if group == "eval":
        close += close_matches(option, harness_index(), cutoff=0.8)[:1]
    wrong = f"{group}={option} is not an option"
    if close:
        return f"{wrong}: did you mean {' or '.join(close)}? --help lists all options."
    hint = f"{wrong}: there are {first_few(names, 5)}"
    if group == "eval":
        hint += ", and the tasks of the harness, such as arc_easy"
    if len(names) > 5:
        hint += " (--help lists all)"
    if group != "stage":
        hint += f". Or write {group}/{option}.yaml in DIR and give --config-dir=DIR"
    return f"{hint}."


def not_read(word: str, stage: str) -> str:
    remedy = "Remove it"
    if stage in ("plan", "table"):
        remedy = f"Set every.{word} for the runs of the table, or remove it"
    return (
        f"stage={stage} does not read {word}. {remedy}. It reads {listed(conf.groups_read(stage))}."
    )


def explain_key(key: str, holder: Any, stage: str) -> str:
    """Return a message about a key that does not exist.

    `holder` is the type that should have the key's last name.
    """
    if key in REMOVED:
        return removed_text(key)
    group = key.partition(".")[0]
    if f"stage={group}" in REMOVED:
        return removed_text(f"stage={group}")
    kind = conf.stage_class(stage)
    known = sorted({*conf.groups_read(stage), *names_of(kind)})
    if group in conf.groups() and group not in known:
        return not_read(key, stage)
    if holder is kind and "." not in key:
        inside = [name for name in sorted(keys_of(stage)) if "." in name]
        return unknown_key(key, names_of(kind), inside)
    if holder is not kind and is_dataclass(holder):
        return unknown_key(key, names_of(holder))
    if close_matches(group, known):
        return unknown_key(group, known)
    return f"unknown key {key}: stage={stage} reads {listed(conf.groups_read(stage))}"


def keys_of(stage: str) -> set[str]:
    """Return the keys of a stage: its groups and fields, and the fields in them."""
    kind = conf.stage_class(stage)
    keys = {*conf.groups_read(stage), *names_of(kind)}
    for name in list(keys):
        if name == "merge":
            kinds = [*conf.METHODS.values()]
        else:
            kinds = [type_inside(kind, name)]
        for holder in kinds:
            keys.update(f"{name}.{knob_name}" for knob_name in names_of(holder))
    return keys


def explain_invalid(error: Mapping[str, Any], kind: Any, prefix: str) -> str:
    """Return a message about pydantic's error for a value of a dataclass.

    `prefix` is the beginning of the dataclass' keys.
    """
    holder = kind
    for name in error["loc"][:-1]:
        holder = type_inside(holder, str(name))
    key, value = prefix + ".".join(map(str, error["loc"])), error["input"]
    if error["type"] == "unexpected_keyword_argument":
        return unknown_key(key, names_of(holder))
    if value is None:
        return f"{key}=null: give a value, null is not allowed"
    if error["type"] == "finite_number":
        return f"{key} must be a finite number, got {value}"
    if error["type"] in OUTSIDE:
        meta: Mapping[Any, Any] = {}
        if is_dataclass(holder):
            meta = holder.__dataclass_fields__[error["loc"][-1]].metadata
        return outside_text(key, value, {**error["ctx"], **meta})
    expected = TYPES.get(error["type"].partition("_")[0])
    if expected:
        return f"{key} must be {expected}, got {value!r}"
    if error["type"] == "list_type":
        return f"{key}={value}: write a list, {key}=[{value}]"
    if error["type"] in ("dict_type", "dataclass_type"):
        return f"{key}={value}: it is a mapping, give {key}.KEY=..."
    return f"{key}={value}: {error['msg']}"


def validated(
    kind: type[T], tree: Mapping[str, Any], prefix: str = "", extra: Extra = "forbid"
) -> T:
    """Return the dataclass of a tree of plain values.

    Each value is converted to its type, for example an integer to a float.

    `prefix` is the beginning of the keys in errors.

    Raises:
        PipelineError: an unknown key, or a value of another type.
    """
    try:
        checked: T = adapter(kind).validate_python(tree, extra=extra)  # type: ignore[arg-type]
        return checked
    except ValidationError as error:
        raise PipelineError(
            explain_invalid(error.errors(include_url=False)[0], kind, prefix)
        ) from None


def outside_text(key: str, value: Any, meta: Mapping[str, Any]) -> str:
    """Return a message about a value outside of its options, form or bounds."""
    options = meta.get("options")
    word = f"{key}={value}"
    if word in REMOVED:
        return removed_text(word)
    if options:
        return f"{key} must be one of {', '.join(options)}, got {value!r}"
    form = meta.get("form")
    if form:
        return f"{key}={value} is not of the form {form[1]}: write it so"
    limits = []
    for bound, (words, _) in BOUNDS.items():
        if bound in meta:
            limits.append(f"{words} {meta[bound]}")
    return f"{key} must be {' and '.join(limits)}, got {value}"


def type_inside(kind: Any, name: str) -> Any:
    """Return the type of a field, or of the items of a dict or list.

    Returns None if the field does not exist.
    """
    if is_dataclass(kind):
        hint = type_hints(kind).get(name)  # type: ignore[arg-type]
    else:
        hint = next(iter(get_args(kind)[-1:]), None)
    if not isinstance(hint, UnionType):
        return hint
    members = []
    for member in get_args(hint):
        if member is not type(None):
            members.append(member)
    return next((member for member in members if is_dataclass(member)), members[0])


@cache
def type_hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
