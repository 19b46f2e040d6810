"""Input pipelines: which examples a step sees, read by random access and prepared in tf.data.

In reading order: `order` (which examples a step sees), `source` and `sources` (where examples come from; `arrays`,
`records`, `map_style`), `images` (what is done to one), `pipeline` and `stream` (batches). Importing this package does
not import TensorFlow.
"""

import os

# Read by TensorFlow when it is imported. oneDNN rounds by the CPU type, and the same example should be prepared in the
# same bits everywhere; the other keeps its start-up notices from the terminal.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from data.images import CentreCrop, NormalizedImage, RandomResizedCrop, ShiftedImage
from data.order import Order
from data.pipeline import DataConfig, Pipeline
from data.source import DataError

__all__ = [
    "CentreCrop",
    "DataConfig",
    "DataError",
    "NormalizedImage",
    "Order",
    "Pipeline",
    "RandomResizedCrop",
    "ShiftedImage",
]
