"""Tables of experiments: a YAML file as a plan of runs, and each cell as an expression over their
scores.

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
uses, itself or through its inputs: three `math`, three `language` and six `merged`, the run specs
(`run_specs.py`). There are two cells. The one in row `soup` and column `math` holds three scores,
of `merged` at merge=soup and each seed; their mean is its number (`plan.py`). `planned_runs.py`
composes the configuration of each spec and builds its run with its hash, finished or not: 19 runs
with the data sets, as equal ones are one; report/ reads their numbers.
"""
