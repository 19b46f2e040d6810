"""Input pipelines: which examples a step sees, read by random access and prepared in tf.data.

In reading order: `order` (which examples a step sees), `sources`, `records`, `map_style` (where examples come
from), `images` (what is done to one), `pipeline` (batches). Importing this package does not import
TensorFlow.
"""

from data.images import CentreCrop, NormalizedImage, RandomResizedCrop, ShiftedImage
from data.order import Order
from data.pipeline import DataConfig, Pipeline
from data.sources import DataError

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
