"""Sphinx: builds offline, with every warning an error, and without TensorFlow."""

import sys
from pathlib import Path

from penstock_proto import distribution

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import events  # noqa: E402
import figures  # noqa: E402
import format_table  # noqa: E402
import metrics  # noqa: E402
import rooms  # noqa: E402
import states  # noqa: E402

for made in (rooms, events, states, format_table, figures, metrics):  # pages include what they make from the code
    (HERE / f"_{made.__name__}.md").write_text(made.page())

project = "Penstock"
author = "the Penstock maintainers"
copyright = "the Penstock maintainers"
version = release = distribution.version()

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
exclude_patterns = ["_build", "_*.md"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

# There is no intersphinx, so names of other projects do not resolve. Our own must.
_elsewhere = (
    "asyncio|click|collections|contextlib|h5py|keras|logging|msgspec|np|numpy|os|pathlib|socket|tensorflow"
    "|tf|torch|types|typing|typing_extensions|zmq|IterableDataset|PyDataset"
)
nitpick_ignore_regex = [("py:.*", rf"({_elsewhere})(\..*)?")]

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_title = f"Penstock {release}"
smartquotes_action = "qe"  # not dashes: --json is an option
