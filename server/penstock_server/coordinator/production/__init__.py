"""Production: which run of which worker fills which turn, and what happens when it fails.

It knows no consumers. Begin with `production.py`.
"""
