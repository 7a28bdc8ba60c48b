"""Find the sample that breaks a feed, in this process: with a traceback and, if you like, a debugger.

python debug.py            # show the error, and a local variable where it was raised
python -m pdb debug.py     # or stop there
"""

import traceback

import numpy as np

import penstock
from penstock import Feed

ROWS = {"a.csv": ["1,2", "3,4", "5,6"], "b.csv": ["7,8", "9,", "10,11"]}


def rows(name):
    """Yield the rows of one file as float32 (2,)."""
    for line in ROWS[name]:
        yield np.array([float(cell) for cell in line.split(",")], np.float32)


feed = Feed(rows, splits=sorted(ROWS), batch_size=2, lanes=1, turn=1)


def main():
    with penstock.connect(feed, workers=0) as connection:
        try:
            for batch in connection.batches():
                print("good:", batch.tolist())
        except penstock.GeneratorError as error:
            print(error)
            cause = error.__cause__  # the exception that `rows` raised
            for frame, line in traceback.walk_tb(cause.__traceback__):
                if frame.f_code.co_name == "rows":
                    print(f"line {line}: line={frame.f_locals['line']!r}")


if __name__ == "__main__":
    main()
