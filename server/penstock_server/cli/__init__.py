"""The commands of the server's side, and their options. Each command has a module.

Only `main.py` and what the command needs is imported before it runs. Begin with `main.py`.
"""
