"""Items of mgsm_steps: the next calculation of a worked solution.

See docs/reference/evaluation.md.
"""
