"""Single options of a feed, each with its check: the generator's arguments, transforms, the spec, values such as
`Shuffle`, the cache's key.

It knows no other feeds. Begin with `feed_options.py`.
"""
