"""Items and scores of held_out.yaml.

The harness reads this file, also from its command line without this package.
"""

import math


def items(rows):
    return rows.map(build_item, remove_columns=rows.column_names)


def build_item(row):
    """Return the prompt and the completion, joined by a line feed as in trainings by default.

    Plain text has no prompt.
    """
    if "text" in row:
        return {"prompt": "", "completion": row["text"]}
    return {
        "prompt": row["prompt"],
        "completion": ("\n" if row["prompt"] else "") + row["completion"],
    }


def score_text(doc, results):
    """Return `bits`, the log2 probability of the text."""
    ((likelihood, _),) = results
    return {"bits": likelihood / math.log(2)}
