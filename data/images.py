"""What is done to one image: pairs for training and evaluation, as dataclasses whose fields flags can set.

Each is called on one decoded example inside tf.data, with a seed that is a function of (run seed, example,
epoch), and returns {"image": float32[size, size, channels], "label": int32[]}, and "id" where the dataset has
an integer one. Every other feature is left behind (CIFAR's and ImageNet's "id" and "file_name" are text,
which no device takes).

    dataset   training                                    evaluation
    digits    ShiftedImage(pixels=1, flip=False)          NormalizedImage()
    CIFAR     ShiftedImage(pixels=4, flip=True)           NormalizedImage()
    ImageNet  RandomResizedCrop()                         CentreCrop()
"""

import dataclasses
from typing import Any, ClassVar

from data.source import Tensors

# Per channel, of the training set's pixels in [0, 1].
DIGITS_MEAN, DIGITS_STD = (0.287,), (0.354,)
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclasses.dataclass
class NormalizedImage:
    """The whole image, normalised: evaluation of images that have one size."""

    mean: tuple[float, ...] = CIFAR10_MEAN  # of pixels in [0, 1], per channel
    std: tuple[float, ...] = CIFAR10_STD

    def __call__(self, example: Tensors, seed: Any) -> Tensors:
        """`seed` is not used."""
        return _outputs(example, _normalize(example["image"], self.mean, self.std))


@dataclasses.dataclass
class ShiftedImage:
    """Shifts by up to `pixels` in each direction, black where nothing was, and maybe mirrors.

    This is the "pad by 4, crop at random, flip" of CIFAR training (He et al., "Deep Residual Learning for
    Image Recognition", CVPR 2016, section 4.2). Digits change their meaning in a mirror: flip=False.
    """

    pixels: int = 4  # largest shift
    flip: bool = True  # mirror left to right, half the time
    mean: tuple[float, ...] = CIFAR10_MEAN  # of pixels in [0, 1], per channel
    std: tuple[float, ...] = CIFAR10_STD

    def __call__(self, example: Tensors, seed: Any) -> Tensors:
        """The image keeps its size."""
        import tensorflow as tf

        image = example["image"]
        margin = [[self.pixels, self.pixels], [self.pixels, self.pixels], [0, 0]]
        image = tf.image.stateless_random_crop(tf.pad(image, margin), image.shape, _fold_in(seed, 0))
        if self.flip:
            image = tf.image.stateless_random_flip_left_right(image, _fold_in(seed, 1))
        return _outputs(example, _normalize(image, self.mean, self.std))


@dataclasses.dataclass
class RandomResizedCrop:
    """A random part of the image, resized to a square, mirrored half the time: ImageNet training.

    Area and aspect ratio are drawn as for Inception (Szegedy et al., "Going Deeper with Convolutions", CVPR
    2015, section 6). Only the part is decoded. Needs JPEG.
    """

    size: int = 224  # pixels a side
    area: tuple[float, float] = (0.08, 1.0)  # share of the image, lowest and highest
    aspect_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width over height, lowest and highest
    mean: tuple[float, ...] = IMAGENET_MEAN  # of pixels in [0, 1], per channel
    std: tuple[float, ...] = IMAGENET_STD
    encoded: ClassVar[tuple[str, ...]] = ("image",)

    def __call__(self, example: Tensors, seed: Any) -> Tensors:
        """Takes the image as JPEG bytes."""
        import tensorflow as tf

        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(example["image"]),
            bounding_boxes=tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            seed=_fold_in(seed, 0),
            min_object_covered=0.0,
            aspect_ratio_range=self.aspect_ratio,
            area_range=self.area,
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        image = _decode_window(example["image"], begin[:2], extent[:2], self.size)
        image = tf.image.stateless_random_flip_left_right(image, _fold_in(seed, 1))
        return _outputs(example, _normalize(image, self.mean, self.std))


@dataclasses.dataclass
class CentreCrop:
    """The central square, as if the shorter side had been resized to `resize` and `size` cut out: ImageNet
    evaluation.

    (Krizhevsky et al., NeurIPS 2012, with the sizes of He et al., CVPR 2016.) Only the square is decoded, and
    resized once. Needs JPEG.
    """

    size: int = 224  # pixels a side
    resize: int = 256  # pixels of the shorter side before the cut
    mean: tuple[float, ...] = IMAGENET_MEAN  # of pixels in [0, 1], per channel
    std: tuple[float, ...] = IMAGENET_STD
    encoded: ClassVar[tuple[str, ...]] = ("image",)

    def __call__(self, example: Tensors, seed: Any) -> Tensors:
        """Takes the image as JPEG bytes. `seed` is not used."""
        import tensorflow as tf

        shape = tf.io.extract_jpeg_shape(example["image"])[:2]
        side = tf.cast(tf.reduce_min(shape), tf.float32) * (self.size / self.resize)
        extent = tf.repeat(tf.maximum(1, tf.cast(tf.round(side), tf.int32)), 2)
        image = _decode_window(example["image"], (shape - extent) // 2, extent, self.size)
        return _outputs(example, _normalize(image, self.mean, self.std))


def _decode_window(jpeg: Any, begin: Any, extent: Any, size: int) -> Any:
    """The window at `begin` of `extent` (int32[2]: rows, columns), resized to float32[size, size, 3]."""
    import tensorflow as tf

    window = tf.concat([begin, extent], axis=0)
    image = tf.image.decode_and_crop_jpeg(jpeg, window, channels=3)
    return tf.ensure_shape(tf.image.resize(image, [size, size]), [size, size, 3])


def _normalize(image: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> Any:
    """Pixels of 0–255 to (pixel/255 − mean) / std. Raises ValueError unless they fit the channels."""
    import tensorflow as tf

    if not image.shape[-1] == len(mean) == len(std):
        raise ValueError(
            f"data.preprocess: expected a mean and a std for each of the image's {image.shape[-1]} "
            f"channels; found "
            f"mean={mean}, std={std}. Give those of this dataset."
        )
    scale = tf.constant([1 / (255 * channel) for channel in std], tf.float32)
    shift = tf.constant([m / s for m, s in zip(mean, std, strict=True)], tf.float32)
    return tf.cast(image, tf.float32) * scale - shift


def _fold_in(seed: Any, use: int) -> Any:
    """A seed of its own for each use, so that no two draws on an example depend on each other."""
    import tensorflow as tf

    return tf.random.experimental.stateless_fold_in(seed, use)


def _outputs(example: Tensors, image: Any) -> Tensors:
    """Image, label and, where there is an integer one, id."""
    import tensorflow as tf

    outputs = {"image": image, "label": tf.cast(example["label"], tf.int32)}
    if "id" in example and example["id"].dtype.is_integer:
        outputs["id"] = example["id"]
    return outputs
