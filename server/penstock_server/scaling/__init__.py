"""How many workers and hosts there are: `penstock scale`, and `--workers auto` or MIN:MAX.

Begin with `scaling.py`.
"""
