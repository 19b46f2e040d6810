"""scikit-learn's handwritten digits as a TFDS dataset: real images that need no download."""
