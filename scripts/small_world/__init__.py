"""The small world: a constructed world with known truth, in the files and schemas of the real data.

English-like text and three clone languages (qaa, qab, qac: high, medium, low resource) that share
grammar, names, digits and punctuation with it and nothing else: each English word stands for one
word of two syllables a clone. Everything is a function of the seed. `write` makes a folder laid out
as any `data_root`:

    mgsm/{lang}/{train,dev,test}.jsonl           8 worked exemplars; word problems of one to three
    steps belebele/{lang}/{dev,test}.jsonl             four-way reading comprehension
    global_mmlu/{lang}/{dev,development,test}.jsonl  four-way facts of three subjects; dev holds the
    exemplars flores/{lang}/{dev,devtest}.jsonl            parallel sentences orca_math/train.jsonl,
    aya/train.jsonl       English math; instructions in the clones, with no math text/train.jsonl
    plain text that makes the base tokenizer/                                   one token an English
    word, two a clone word, bytes for the rest world.json                                   its seed
    and languages data_card.md                                 what was written, and what math is
    where

No development or test item of any benchmark stands in a training file: all are drawn before, and
kept apart by their English meaning, so that no translation of one can slip in either.
"""
