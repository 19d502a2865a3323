"""Items of mgsm_steps: the next calculation of a worked solution among four
(docs/reference/evaluation.md).
"""
