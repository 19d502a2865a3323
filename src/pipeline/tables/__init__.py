"""Tables of experiments: a YAML file as a plan of runs, and cells as expressions over scores.

A small table, two merges over three seeds:

    name: small
    axes:
      seed: [0, 1, 2]
      merge: [soup, ties]
    every: {model: sandbox, data_root: world}
    runs:
      world: {stage: data, expert: sandbox}
      math: {stage: sft, expert: math, recipe: sandbox_math, seed: "{seed}"}
      language: {stage: sft, expert: qac, recipe: sandbox_language, seed: "{seed}"}
      merged: {merge: "{merge}", merge.experts: [math, language]}
    rows:
      "{merge}": {run: merged, mean: [seed]}
    columns:
      math: {eval: mgsm_0shot, in: qac}

`schema.py` reads it. `expand.py` instantiates each run once per combination of the axes that it
uses, directly or through its inputs: three `math`, three `language` and six `merged`. These are the
run specs (`run_specs.py`). There are two cells. The cell in row `soup` and column `math` has three
scores, of `merged` at merge=soup and each seed; their mean is its number (`plan.py`).
`planned_runs.py` composes the configuration of each spec and builds its run with its hash, finished
or not. With the data sets these are 19 runs, because equal ones are shared. report/ reads their
numbers.
"""
