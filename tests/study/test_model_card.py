"""What a model card says of a model, from configurations as they are composed."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from pipeline.commands.model_card import Origin, origin_from_config, render_card
from pipeline.config.compose import compose


def asked(*words: str) -> dict[str, Any]:
    return asdict(compose(list(words)))  # type: ignore[call-overload]


def of(config: dict[str, Any]) -> Origin:
    return origin_from_config("mine", config)


def test_a_training_from_the_hub_names_its_base_sets_and_licence() -> None:
    made_of = of(asked("stage=sft", "expert=sw", "model=llama3.1_8b"))
    card = render_card("# Mine", made_of, tags=["sft"], relation="finetune", licence="mit")
    data = ModelCard(card).data.to_dict()
    assert (
        data["base_model"] == ["meta-llama/Llama-3.1-8B"]
        and data["base_model_relation"] == "finetune"
    )
    assert data["license"] == "mit"
    assert {"CohereLabs/aya_dataset", "lelapa/Inkuba-instruct"} <= set(data["datasets"])
    assert ("inkuba", "lelapa/Inkuba-instruct", "CC-BY-NC-4.0") in made_of.sets
    assert made_of.licences == {"mine": "llama3.1"}


def test_a_joint_set_is_of_both_and_what_was_left_out_is_not_named() -> None:
    words = [
        "stage=sft",
        "expert=math_sw",
        "sft=mixed",
        "model=qwen2.5_7b_instruct",
        "data.leave_out=[nllb]",
    ]
    names = [name for name, _, _ in of(asked(*words)).sets]
    assert "orca_math" in names and "aya" in names and "nllb" not in names
    text = ["stage=cpt", "expert=math", "model=llama3.1_8b"]
    assert [name for name, _, _ in of(asked(*text)).sets] == ["open_web_math"]


def test_of_a_file_below_data_root_the_licence_is_the_users_and_never_the_one_on_the_hub(
    tmp_path: Path,
) -> None:
    """It need not be the set of that name on the Hub."""
    asked_for = asked(
        "stage=sft",
        "expert=sw",
        "model=llama3.1_8b",
        f"data_root={tmp_path}",
        "data.leave_out=[nllb]",
    )
    asked_for["expert"]["sources"]["inkuba"] |= {"hub": None, "licence": "mine"}
    found = {name: (hub, licence) for name, hub, licence in of(asked_for).sets}
    assert found.pop("inkuba") == (None, "mine") and found and set(found.values()) == {(None, "")}
