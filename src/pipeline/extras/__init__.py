"""Extensions that the papers' experiments do not need.

The entry points in pyproject.toml register them as stages, merge methods and backends, like those
of other packages.
"""
