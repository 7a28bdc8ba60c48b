"""Formats of data files: one folder for each, with its `Format`, its reader and its description for `penstock peek`.

A source is two small objects that can be pickled. One lists the splits, and the other yields the samples of a split.
`Feed.from_...` gives both to an ordinary feed, so nothing else in the system knows about files. Both run in workers.
They import the library of their format, and open files, only when they are called. registry.py finds the format of a
file.
"""
