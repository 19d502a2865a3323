"""Tables of experiments: a YAML file as a plan of runs, and a cell of the result as an expression over their scores.

A small table, two merges of three seeds:

    name: small
    axes: {seed: [0, 1, 2], merge: [soup, ties]}
    every: {model: sandbox}
    runs:
      math:     {stage: sft, expert: math, seed: "{seed}"}
      language: {stage: sft, expert: qac, seed: "{seed}"}
      merged:   {merge: "{merge}", experts: [math, language]}
    rows:    [{name: "{merge}", run: merged}]
    columns: [{name: mgsm, eval: mgsm_0shot, in: qac, mean: seed}]

`schema.py` reads it. `expand.py` instantiates each run once per combination of the axes that it uses, directly or through
its inputs: three runs of `math`, three of `language`, six of `merged`, the run specs (`run_specs.py`). Its cells are two: row
soup, column mgsm holds three scores, of `merged` at merge=soup and each seed, and their mean is its number (`plan.py`).
`planned_runs.py` composes the configuration of each spec and builds its run, with a hash, whether it is finished or not;
equal ones are one run. `bound.py` is the plan with these runs, from which results/ computes the numbers.
"""
