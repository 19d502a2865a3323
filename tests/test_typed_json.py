"""JSON as dataclasses: what `asdict` and json wrote comes back equal, and other JSON is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from pipeline.typed_json import from_json


@dataclass
class Wheel:
    inches: float
    spokes: int | None = None


@dataclass
class Bicycle:
    name: str
    folder: Path
    kind: Literal["city", "race"] = "city"
    wheels: list[Wheel] = field(default_factory=list)
    parts: Mapping[str, Wheel] = field(default_factory=dict)
    notes: Sequence[str] = ()
    rest: dict[str, Any] = field(default_factory=dict)


def test_what_was_written_comes_back() -> None:
    bicycle = Bicycle(
        "b", Path("a/b"), "race", [Wheel(28, 36), Wheel(26.5)], {"spare": Wheel(1.0)}, ("x",), {"k": [1, {"l": None}]}
    )
    text = json.dumps(asdict(bicycle), default=str)
    assert from_json(Bicycle, json.loads(text)) == bicycle
    assert from_json(Bicycle, {"name": "b", "folder": "c", "bell": True}) == Bicycle("b", Path("c"))


@pytest.mark.parametrize(
    "changed",
    [{"name": 3}, {"name": None}, {"wheels": {}}, {"wheels": [{"inches": "28"}]}, {"wheels": [{"inches": True}]},
     {"notes": "abc"}, {"wheels": [{"spokes": 3}]}, {"folder": 1}],
)  # fmt: skip
def test_json_of_another_form_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises((TypeError, KeyError)):
        from_json(Bicycle, {"name": "b", "folder": "c", **changed})


def test_a_base_class_stands_for_several() -> None:
    @dataclass
    class Motor(Wheel):
        watts: int = 0

    value = from_json(Wheel, {"inches": 1, "watts": 5}, lambda kind, inner: Motor if "watts" in inner else kind)
    assert value == Motor(1, None, 5)
