"""Reads splits: starts the user's generator, applies transforms, and checks that samples can be made again.

It knows no slots and no runs. Begin with `split_opener.py`.
"""
