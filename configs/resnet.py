"""ResNets on images: `digits` (default), `cifar10`, `imagenet`.

digits     python train.py --config=configs/resnet.py
           A small ResNet-18 on scikit-learn's 1,797 handwritten digits, no download.
cifar10    python train.py --config=configs/resnet.py:cifar10
           ResNet-18 with a 3x3 stem, 200 epochs: about 95 % test accuracy (He et al. 2015, arXiv:1512.03385, section
           4.2, for the augmentation). TFDS downloads 163 MiB.
imagenet   python train.py --config=configs/resnet.py:imagenet
           ResNet-50, 90 epochs, learning rate 0.1 per 256 images, 5 epochs of warm-up: the recipe of Goyal et al. 2017
           (arXiv:1706.02677; 23.6 % +- 0.1 top-1 error with step decay), here with cosine decay (Loshchilov & Hutter
           2017, arXiv:1608.03983): expect 76 to 77 % top-1.
"""

from data import images
from models import ResNetConfig
from trainer import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    ImageClassifier,
    OptimizerConfig,
    ScheduleConfig,
)
from trainer.errors import unknown_name


def warmup_cosine(warmup: str) -> ScheduleConfig:
    """From 0 to the learning rate in `warmup`, then by a cosine to 0 at the end of the run."""
    return ScheduleConfig(
        "warmup_cosine_decay_schedule",
        {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": warmup, "decay_steps": "100%"},
    )


def digits() -> Config:
    normalize = {"mean": images.DIGITS_MEAN, "std": images.DIGITS_STD}
    return Config(
        trainer=ImageClassifier,
        model=ResNetConfig(depth=18, num_classes=10, stem="small", width=16, in_channels=1),
        data=DataConfig("digits", "train", images.ShiftedImage(pixels=1, flip=False, **normalize)),
        evals=(EvalConfig(DataConfig("digits", "test", images.NormalizedImage(**normalize)), every="5 epochs"),),
        batch_size=128,
        train_for="20 epochs",
        optimizer=OptimizerConfig(
            name="sgd",
            learning_rate=0.1,
            arguments={"momentum": 0.9, "nesterov": True},
            weight_decay=1e-4,
            schedule=warmup_cosine("10%"),
        ),
        checkpoint=CheckpointConfig(every="5 epochs", best="accuracy"),
    )


def cifar10() -> Config:
    return Config(
        trainer=ImageClassifier,
        model=ResNetConfig(depth=18, num_classes=10, stem="small"),
        data=DataConfig("cifar10", "train", images.ShiftedImage()),
        evals=(EvalConfig(DataConfig("cifar10", "test", images.NormalizedImage())),),
        batch_size=128,
        train_for="200 epochs",
        optimizer=OptimizerConfig(
            name="sgd",
            learning_rate=0.1,
            per_examples=128,
            arguments={"momentum": 0.9, "nesterov": True},
            weight_decay=5e-4,
            schedule=warmup_cosine("5 epochs"),
        ),
        checkpoint=CheckpointConfig(best="accuracy"),
    )


def imagenet() -> Config:
    return Config(
        trainer=ImageClassifier,
        model=ResNetConfig(depth=50, num_classes=1000, dtype="bfloat16"),
        data=DataConfig("imagenet2012", "train", images.RandomResizedCrop()),
        evals=(EvalConfig(DataConfig("imagenet2012", "validation", images.CentreCrop())),),
        batch_size=1024,
        train_for="90 epochs",
        optimizer=OptimizerConfig(
            name="sgd",
            learning_rate=0.1,
            per_examples=256,
            arguments={"momentum": 0.9, "nesterov": True},
            weight_decay=1e-4,
            schedule=warmup_cosine("5 epochs"),
        ),
        checkpoint=CheckpointConfig(best="accuracy"),
    )


_VARIANTS = {"digits": digits, "cifar10": cifar10, "imagenet": imagenet}


def get_config(variant: str = "digits") -> Config:
    """The config of a variant."""
    if variant not in _VARIANTS:
        raise unknown_name("variant", variant, _VARIANTS)
    return _VARIANTS[variant]()
