"""The trainer's side of the commands: what `penstock bench`, `peek`, `profile` and `top` read and measure.

`penstock_command` imports it. It is not for users. Begin with `reading.py`.
"""
