"""`penstock peek`: shows the contents of data files and of feeds, and how to serve a file.

For each format a module finds the columns of a data file. `sampling.py` reads some samples through the same sources as
a feed does, in the child process of `bounded.py`. `summary.py` summarizes them, `proposal.py` makes the command and the
module that serve the file, and `file_report.py` and `feed_report.py` turn all of it into lines of text or JSON. Only
`sheet.py` writes a file: the contact sheet.
"""
