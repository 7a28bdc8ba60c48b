"""The items of indexable objects: an item by its position, and the order in which a run reads them.

It knows no splits and no batches. Begin with `items.py`.
"""
