"""What users declare: `Feed`, the checks of its options, and the warnings about them.

It runs no generator and opens no file. `options/` has single options, `objects/` the objects of other libraries that a
feed may read, and `combined/` feeds made of feeds. Begin with `feed.py`.
"""
