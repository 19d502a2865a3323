"""The small world: a constructed world with known truth, in the files and schemas of the real data.

The world has English-like text and three clone languages: qaa (high resource), qab (medium) and qac
(low). Clones share only grammar, names, digits and punctuation with English. Each English word has
one translation of two syllables in each clone. Everything is a function of the seed. `write` makes
a folder with the layout of a `data_root`:

    mgsm/{lang}/{train,dev,test}.jsonl               8 worked exemplars; problems of 1 to 3 steps
    belebele/{lang}/{dev,test}.jsonl                 four-way reading comprehension
    global_mmlu/{lang}/{dev,development,test}.jsonl  four-way facts of three subjects;
                                                     dev has the exemplars
    flores/{lang}/{dev,devtest}.jsonl                parallel sentences
    orca_math/train.jsonl                            English math
    aya/train.jsonl                                  instructions in the clones, without math
    text/train.jsonl                                 plain text to train a base on
    tokenizer/                                       one token per English word, two per clone
                                                     word, bytes for other text
    world.json                                       the seed and the languages
    data_card.md                                     the files, and which of them have math

Training files contain no development or test item of any benchmark. These items are drawn first and
compared by their English meaning, so that translations of them are excluded too.
"""
