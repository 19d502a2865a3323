"""Words of the command line that keep things tiny: a small world, a small Llama, a few steps."""

from collections.abc import Sequence

WORLD = ["expert=sandbox", "expert.world.items=4"]
TINY = [
    "model=sandbox_random",
    *("model.architecture.hidden_size=32", "model.architecture.intermediate_size=64"),
    *("model.architecture.num_hidden_layers=14", "model.architecture.num_attention_heads=2"),
    "model.architecture.num_key_value_heads=2",
]
FEW = [
    *(
        "sft.seq_length=96",
        "sft.batch_size=4",
        "sft.micro_batch_size=4",
        "sft.steps=2",
        "sft.warmup_steps=0",
    ),
    "sft.precision=fp32",
]


def last_of(words: Sequence[str]) -> list[str]:
    """Return the words without those whose key comes again.

    A test changes what it starts from, and the program refuses a key that is set twice.
    """
    keys = [word if word.startswith("-") else word.partition("=")[0] for word in words]
    last = {key: place for place, key in enumerate(keys)}
    return [
        word
        for place, (key, word) in enumerate(zip(keys, words, strict=True))
        if last[key] == place
    ]
