"""Make items of mgsm_steps: choose the next calculation of a worked solution.

See docs/reference/evaluation.md.
"""
