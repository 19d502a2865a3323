"""Items and scores of held_out.yaml; read by the harness, also by its own command line, without
this package.
"""

import math


def items(rows):
    return rows.map(build_item, remove_columns=rows.column_names)


def build_item(row):
    """Prompt and completion, joined by a line feed as trainings join them by default.

    Plain text has no prompt.
    """
    if "text" in row:
        return {"prompt": "", "completion": row["text"]}
    return {
        "prompt": row["prompt"],
        "completion": ("\n" if row["prompt"] else "") + row["completion"],
    }


def score_text(doc, results):
    """bits: the log2 probability of the text."""
    ((likelihood, _),) = results
    return {"bits": likelihood / math.log(2)}
