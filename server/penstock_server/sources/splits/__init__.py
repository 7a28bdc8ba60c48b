"""The splits of data files: ranges of rows, ranges of bytes, and whole files, and how many of them make good work."""
