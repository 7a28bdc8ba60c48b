"""Readers of data files: one module for each format.

A source is two small objects that can be pickled. One lists the splits, and the other yields the samples of a split.
`Feed.from_...` gives both to an ordinary feed, so nothing else in the system knows about files. Both run in workers.
They import the library of their format, and open files, only when they are called.
"""
