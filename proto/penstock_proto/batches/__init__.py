"""What a batch looks like in memory: its spec, its layout in a slot, and its place in a stream.

Begin with `layout.py`.
"""
