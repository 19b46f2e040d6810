"""Text → windows of tokens: all documents behind one another, cut into fixed windows that are read in any order."""

import dataclasses
from pathlib import Path

import numpy as np

END_OF_TEXT = 0
"""The token between documents where bytes are the tokens; no text holds a zero byte."""

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
_TEST_SHARE = 20  # of a folder's files, one in so many is for testing


@dataclasses.dataclass
class PackedText:
    """A `DataConfig.source`: call it to get `{"inputs", "targets"}`, int[num_windows, context] each.

    A window's targets are its inputs one token later; windows do not overlap, so every token is a target once an epoch.

    Attributes:
      text: a TFDS dataset with a feature "text", or a folder whose files are read in the order of their names.
      split: of the TFDS dataset; "train" or "test" of a folder, whose last files, a twentieth, are for testing.
      context: tokens of a window.
      tokenizer: a file of the `tokenizers` library; None: the bytes are the tokens.
      pattern: which files of a folder.
    """

    text: str = "python_stdlib"
    split: str = "train"
    context: int = 256
    tokenizer: str | None = None
    pattern: str = "**/*.txt"

    def __post_init__(self) -> None:
        """Raises ValueError for a window that holds no token."""
        if self.context < 1:
            raise ValueError(f"PackedText.context: expected at least 1 token; found {self.context}.")

    def __call__(self) -> dict[str, np.ndarray]:
        """Views into one array of tokens, uint8 for bytes and int32 otherwise.

        Raises:
          ValueError: the text is not there, is shorter than one window, or the tokenizer cannot be read.
        """
        documents = _folder(self) if Path(self.text).expanduser().is_dir() else _dataset(self.text, self.split)
        tokens = _bytes(documents) if self.tokenizer is None else _encode(documents, self.tokenizer)
        if len(tokens) <= self.context:
            raise ValueError(
                f"PackedText: expected more than context={self.context} tokens; {self.text!r}, split {self.split!r}, "
                f"has {len(tokens)}. Lower context or give more text."
            )
        windows = np.lib.stride_tricks.sliding_window_view(tokens, self.context + 1)[:: self.context]
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def _dataset(name: str, split: str) -> list[bytes]:
    """The documents of a TFDS dataset, read in the order of its files."""
    from data.records import RecordSource

    source = RecordSource(name, split, ())
    try:
        return source.feature("text")
    finally:
        source.close()


def _folder(config: PackedText) -> list[bytes]:
    files = sorted(path for path in Path(config.text).expanduser().glob(config.pattern) if path.is_file())
    num_test = -(-len(files) // _TEST_SHARE)
    if config.split not in ("train", "test") or len(files) <= num_test:
        raise ValueError(
            f"PackedText.split: expected 'train' or 'test' and at least 2 files that match {config.pattern!r} in "
            f"{config.text}; found {config.split!r} and {len(files)} files."
        )
    return [file.read_bytes() for file in (files[:-num_test] if config.split == "train" else files[-num_test:])]


def _bytes(documents: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(document + bytes([END_OF_TEXT]) for document in documents), np.uint8)


def _encode(documents: list[bytes], path: str) -> np.ndarray:
    """Token ids by a `tokenizers` file; documents are divided by its end-of-text token, if it has one."""
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError("PackedText.tokenizer: needs the tokenizers library; pip install tokenizers.") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(Path(path).expanduser()))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(
            f"PackedText.tokenizer: expected a tokenizers file; {path!r} does not open: {error}"
        ) from error
    end = next(
        (tokenizer.token_to_id(token) for token in _END_TOKENS if tokenizer.token_to_id(token) is not None), None
    )
    ids = (
        encoding.ids
        for encoding in tokenizer.encode_batch([document.decode(errors="replace") for document in documents])
    )
    between = [] if end is None else [end]
    return np.concatenate([np.array([*document, *between], np.int32) for document in ids])
