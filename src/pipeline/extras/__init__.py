"""What the papers' experiments do not need: found by name through the entry points in
pyproject.toml, as stages, merge methods and backends of other packages are. Nothing outside of this
folder imports from it.
"""
