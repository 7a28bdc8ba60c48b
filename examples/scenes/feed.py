"""All the code that Penstock needs to run `SceneGenerator` in worker processes.

Each worker constructs its own objects. A segment is 200 batches: then the generator starts again, with other random
numbers.
"""

import os
from pathlib import Path

from scenes import SceneGenerator

from penstock_server import Feed

FILES = sorted(map(str, Path(os.environ["SCENES_DIR"]).glob("*.h5")))

feed = Feed(SceneGenerator, method="generate_data", args=(FILES,), segment=200, batch_size=None)
