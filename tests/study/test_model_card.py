"""What a model card says of a model, from configurations as they are composed."""

from dataclasses import asdict
from pathlib import Path

from huggingface_hub import ModelCard

from pipeline.commands.model_card import hub_bases, recorded_licence, render_card
from pipeline.config.compose import compose
from pipeline.runs.run import External


def test_a_training_from_the_hub_names_its_base_and_licence() -> None:
    config = asdict(compose(["stage=sft", "expert=sw", "model=llama3.1_8b"]))
    bases = hub_bases(External("mine", "", Path("mine")), [config])
    licence = recorded_licence([config])
    card = render_card("# Mine", bases, tags=["sft"], relation="finetune", licence=licence)
    data = ModelCard(card).data.to_dict()
    assert (
        data["base_model"] == ["meta-llama/Llama-3.1-8B"]
        and data["base_model_relation"] == "finetune"
    )
    assert data["license"] == "llama3.1"
