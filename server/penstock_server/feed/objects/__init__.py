"""Objects of other libraries that a feed may read: indexable data sets, Keras sequences, iterable data sets of torch.

It imports none of these libraries. Begin with `indexables.py`.
"""
