"""How many trainings and scores the papers' tables need, against counts made by hand.

Runs are the same where their filled words and what they are made of are (planned.canonical), in any
table.
"""

from collections.abc import Iterable

import pytest
from planned import canonical, plan, plan_of

from pipeline.tables.plan import ScoreWords, TablePlan
from pipeline.tables.run_specs import Ref

LAYER_SWAPPING = [f"layer_swapping_table{number}" for number in (1, 2, 5, 6)]
UNREASONABLE = [f"unreasonable_{table}" for table in ("table1", "table2", "table3", "table_a1")]
PAIRS = 9 * 4  # 3 math x 3 language experts, 4 languages

# The configurations of a swap: 3 x 3 counts, times the transition zones: none, alike (as shipped),
# each of its own.
ZONES = {
    9: "{none: {bottom: 0, top: 0}}",
    27: "{0: {bottom: 0, top: 0}, 1: {bottom: 1, top: 1}, 2: {bottom: 2, top: 2}}",
    81: (
        "{"
        + ", ".join(f"{a}+{b}: {{bottom: {a}, top: {b}}}" for a in range(3) for b in range(3))
        + "}"
    ),
}


def trainings(plans: Iterable[TablePlan]) -> dict[str, tuple[str, str]]:
    """digest -> (expert, sft) of each distinct training."""
    found = {}
    for one in plans:
        digests = canonical(one)
        for key, spec in one.specs.items():
            if spec.words.get("stage") in ("sft", "cpt"):
                found[digests[key]] = (
                    str(spec.words["expert"]),
                    str(spec.words.get("sft", "full")),
                )
    return found


def mgsm(plans: Iterable[TablePlan]) -> dict[tuple, str]:
    """Return the run's name of each distinct MGSM score.

    Keys are (model's digest, how it is scored, language).
    """
    found = {}
    for one in plans:
        digests = canonical(one)
        for score in one.scores:
            named = {
                key: digests[of.spec] if isinstance(of, Ref) else of
                for key, of in score.words.items()
            }
            if (words := ScoreWords(named))["eval"].startswith("mgsm"):
                name = one.specs[score.model].run if score.model in one.specs else "chosen"
                found[digests[score.model], words, score.language] = name
    return found


@pytest.mark.parametrize(("configurations", "expected"), [(9, 900), (27, 1_548), (81, 3_492)])
def test_layer_swapping_scores(configurations: int, expected: int) -> None:
    """(model, language) pairs of tables 1, 2, 5 and 6:

    base, ten languages                                             10
    math experts, 3 x ten                                           30
    Swahili experts, 3 x ten (table 2)                              30
    te, bn and ja experts, 9 x (their language, English: table 5)   18
    joint models, 3 x ten                                           30
    soups, 36 pairs x 2 weights; the chosen, 9 Swahili pairs in the other nine languages: 72 + 81
    TIES, 3 densities x 2 scales x 9 Swahili pairs; the chosen in the other nine:          54 + 81
    default swaps, 36 pairs in their language; 9 Swahili pairs in the other nine:          36 + 81
    the chosen swap, 9 Swahili pairs in the other nine              81
    table 6, two models a language                                   8
                                                                   ---
                                                                   612
    and 36 pairs for each configuration of the grid but the default, which is counted above.
    """
    without_grid = 10 + 30 + 30 + 18 + 30 + (72 + 81) + (54 + 81) + (36 + 81) + 81 + 8
    assert without_grid == 612 and expected == 612 + PAIRS * (configurations - 1)
    grid = f"axes: {{t: {ZONES[configurations]}}}\n"
    found = mgsm(plan(f"defaults: [{name}]\n{grid}") for name in LAYER_SWAPPING)
    assert len(found) == expected
    assert sum(name == "chosen" for name in found.values()) == 3 * 81


def test_unreasonable_trains_57_models_a_base() -> None:
    """A model's: math full, LoRA, three partitions of each, and Z (table 2): 1 + 1 + 3 + 3 + 1 = 9.

    A language's the same but Z: 8, three times 24. Mixed full and LoRA: 2 x 3 = 6. Simultaneous,
    three partitions of each: 6 x 3 = 18. Table 3 alone lacks mixed LoRA (3) and Z (1): 53.
    """
    assert 9 + 24 + 6 + 18 == 57
    found = trainings(map(plan_of, UNREASONABLE))
    assert len(found) == 4 * 57 == 228
    ways = [way for _, way in found.values()]
    assert ways.count("partial") == 4 * (3 + 1 + 9) and ways.count("simultaneous_lora") == 4 * 9
    assert len(trainings([plan_of("unreasonable_table3")])) == 4 * (57 - 3 - 1) == 212


def test_unreasonable_scores() -> None:
    """Table 3, a model's: base in en, sw, bn, te: 4; mixed, 3 x (target, en): 6.

    Simultaneous, swaps and swaps of partial experts, 3 languages x 3 partitions x full and LoRA x
    (target, en): 36 each. 118, four models 472.

    Tables 1, 2, 3 and a1, when every model is scored in English and its targets, 848: 118; mixed
    LoRA 6; math experts (full, LoRA, 3 + 3 partial) in four languages 32, Z in four 4; language
    experts 24 x 2 = 48; resets in English, A, B, C and Z: 4. Together 212.

    Planned are the printed cells alone, 788: without the English of the LoRA partial experts (table
    1 prints targets only, a1 none of them: 3 math, 9 language) and without Z's three targets (table
    2 is English). 212 - 15 = 197.

    Beside these a1 scores one expert a model, in four languages, with its chat template: 16.
    """
    assert len(mgsm([plan_of("unreasonable_table3")])) == 4 * (4 + 6 + 3 * 36) == 472
    assert 4 * (118 + 6 + 32 + 4 + 48 + 4) == 848
    found = mgsm(map(plan_of, UNREASONABLE))
    chat = [key for key in found if key[1].get("eval.chat_template")]
    assert len(chat) == 4 * 4
    assert len(found) - len(chat) == 4 * (212 - 3 - 9 - 3) == 788


def test_merges_of_unreasonable() -> None:
    """Swaps and swaps of partial experts: 2 x 18 a model, 144.

    Resets:

    A, B, C and Z a model, 16.
    """
    found = {}
    for one in map(plan_of, UNREASONABLE):
        digests = canonical(one)
        found |= {
            digests[key]: spec.words["merge"]
            for key, spec in one.specs.items()
            if spec.kind == "merge"
        }
    kinds = list(found.values())
    assert (kinds.count("layer_swap"), kinds.count("reset")) == (144, 16)
