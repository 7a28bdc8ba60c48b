"""What `penstock peek` shows: what data files and the samples of feeds hold, and how a file can be served.

One file for each format finds the columns of a data file. `sampling.py` reads some samples through the same sources as
a feed does, `summary.py` collects what they hold, `proposal.py` makes the command and the module that serve the file,
and `report.py` puts all of it into lines of text or JSON. Nothing here writes, but for the contact sheet.
"""
