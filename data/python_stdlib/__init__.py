"""The source files of Python's standard library as a TFDS dataset: real text that is on every machine."""
