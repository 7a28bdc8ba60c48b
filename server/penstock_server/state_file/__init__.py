"""The state file of groups (`--state`): a SQLite file that is checked before it is believed.

It knows no group that is open. Begin with `statefile.py`.
"""
