"""Bounds of knobs, what is missing, and what of a configuration decides results."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import pytest

from pipeline.config import stages
from pipeline.config.compose import stage_of
from pipeline.config.conf import OWN_STAGES
from pipeline.config.data import Expert, World
from pipeline.config.evaluation import Eval, EvalTask
from pipeline.config.explain import validated
from pipeline.config.knob import BOUNDS, identity, refuse_empty_lists
from pipeline.config.stages import EvalStage
from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.methods.ties import Ties
from pipeline.stages.rows import RUN_STAGES

DATACLASSES = [
    kind for kind in vars(stages).values() if isinstance(kind, type) and is_dataclass(kind)
]
FIELDS = [
    (kind, item, item.metadata.get("options")) for kind in DATACLASSES for item in fields(kind)
]


def bounded() -> Iterator[tuple[type, str, str, Any]]:
    """(dataclass, field, bound, a value that is just outside) of each bound that is declared."""
    for kind, item, _ in FIELDS:
        whole = "int" in str(get_type_hints(kind)[item.name])
        step = 1 if whole else 1e-9
        for bound, outside in (("ge", -step), ("gt", 0), ("le", step), ("lt", 0)):
            limit = item.metadata.get(bound)
            if limit is not None:
                yield kind, item.name, bound, limit + outside


def made(kind: type, **values: Any) -> Any:
    """Return the dataclass with a value in each required field."""
    given = {item.name: "x" for item in fields(kind) if item.default == "???"}
    given |= {
        item.name: item.metadata["options"][0]
        for item in fields(kind)
        if item.metadata.get("options")
    }
    given |= {"num_fewshot": 0} if kind is EvalTask else {}
    return kind(**given | values)


@pytest.mark.parametrize(("kind", "name", "bound", "outside"), list(bounded()))
def test_a_value_outside_its_bound_is_refused(
    kind: type, name: str, bound: str, outside: Any
) -> None:
    words = BOUNDS[bound][0]
    with pytest.raises(PipelineError, match=rf"^{name} must be .*{words} .*got {outside}"):
        validated(kind, {name: outside})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, item.name)
        for kind, item, _ in FIELDS
        if get_type_hints(kind)[item.name] in (float, float | None)
    ],
)
def test_every_number_must_be_finite(kind: type, name: str, value: float) -> None:
    with pytest.raises(PipelineError, match=f"^{name} must be a finite number, got {value}$"):
        validated(kind, {name: value})


def test_weights_are_finite_and_empty_lists_are_refused() -> None:
    for kind in (Soup, TaskArithmetic):
        with pytest.raises(PipelineError, match="merge.weights=.*nan.* must be finite numbers"):
            kind(experts=["a", "b"], weights=[0.5, float("nan")]).refuse(None, None)
    with pytest.raises(PipelineError, match="^languages is empty"):
        refuse_empty_lists(
            EvalStage(
                stage="eval",
                checkpoint="x",
                eval=Eval(name="x", tasks=[EvalTask("mgsm", 0)]),
                languages=[],
            )
        )


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [(kind, item.name, options) for kind, item, options in FIELDS if options],
)
def test_a_value_that_is_no_option_is_refused(
    kind: type, name: str, options: tuple[str, ...]
) -> None:
    for option in options:
        validated(kind, {name: option})
    with pytest.raises(
        PipelineError, match=f"^{name} must be one of {', '.join(options)}, got 'nonsense'$"
    ):
        validated(kind, {name: "nonsense"})


def test_nested_keys_are_named_in_full() -> None:
    words = {"stage": "eval", "checkpoint": "x", "eval": "mgsm_0shot"}
    with pytest.raises(
        PipelineError, match=r"^eval\.tasks\.0\.num_fewshot must be at least 0, got -1$"
    ):
        stage_of({**words, "eval.tasks": [{"task": "mgsm", "num_fewshot": -1}]})
    with pytest.raises(PipelineError, match=r"^eval\.max_gen_toks_of\.te must be above 0, got 0$"):
        stage_of({**words, "eval.max_gen_toks_of": {"te": 0}})
    with pytest.raises(PipelineError, match=r"^expert\.world\.items must be at least 1"):
        stage_of({"stage": "data", "expert": "sandbox", "expert.world.items": 0})


def test_identity_is_what_differs_from_the_defaults() -> None:
    assert identity(Sft(name="one")) == {"method": "full"}
    assert identity(Sft(name="two", steps=3, seq_length=1024)) == {"method": "full", "steps": 3}
    assert identity(Ties(experts=["a", "b"], density=0.5)) == {"method": "ties", "density": 0.5}
    tasks = [EvalTask("mgsm", 2)]
    scored = {"tasks": [{"task": "mgsm", "num_fewshot": 2}]}
    assert identity(Eval(name="x", tasks=tasks, batch_size=7, dtype="float32")) == scored | {
        "dtype": "float32"
    }
    for rows in (7, None):  # which change answers there
        narrow = {"dtype": "bfloat16", "batch_size": rows, "share_prefix": False}
        assert identity(Eval(name="x", tasks=tasks, **narrow)) == scored | narrow
    explicit = Eval(
        name="x", tasks=tasks, dtype="bfloat16", batch_size=32
    )  # as when it was the default
    assert identity(explicit) == scored | {"dtype": "bfloat16"}
    assert identity(Eval(name="x", tasks=tasks, dtype="float32")) == scored | {"dtype": "float32"}


def test_a_part_that_is_there_differs_from_none() -> None:
    assert identity(Expert(name="x", side="none", world=World())) == {"world": {}}
    assert identity(Expert(name="x", side="none")) == {}


def test_each_stage_that_makes_a_run_has_a_row() -> None:
    assert {
        name for name, kind in OWN_STAGES.items() if issubclass(kind, stages.RunStage)
    } == RUN_STAGES.keys()
