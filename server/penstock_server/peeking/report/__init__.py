"""The reports of `penstock peek`, as text, JSON or a contact sheet.

Begin with `show.py`.
"""
