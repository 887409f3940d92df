"""Real text that every machine has, the source code of Python's standard library as bytes; and batches of any text."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 4 << 20
HELD_OUT_SHARE = 0.1
# Tests and programs that some distributions leave out, tables of character sets, and what is not of the library.
SKIPPED_FOLDERS = {
    *("test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"),
    *("site-packages", "dist-packages", "__pycache__"),
}
# Written when Python is built or installed, so that they differ between machines.
SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True, eq=False)
class Text:
    """A text and the batches drawn from it. ``tokens_N`` [N] of any integer dtype."""

    tokens_N: Tensor

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits: sha256 of the tokens, of a longer text of some that lie evenly in it. Trainings are comparable
        where it is the same.
        """
        every = max(1, len(self.tokens_N) // MAX_BYTES)
        return hashlib.sha256(self.tokens_N[::every].numpy().tobytes()).hexdigest()

    def split(self, held_out: float = HELD_OUT_SHARE) -> tuple[Text, Text]:
        """The text to train on, and the share ``held_out`` at the end to evaluate on."""
        cut = round(len(self.tokens_N) * (1 - held_out))
        return Text(self.tokens_N[:cut]), Text(self.tokens_N[cut:])

    def batch(
        self, step: int, micro_batch: int, rank: int, *, seed: int, batch: int, context: int
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one rank's micro-batch, both int64 [B, C]; a target is the token behind its input.

        A pure function of its arguments. Sequences begin anywhere, drawn anew for each (seed, step, micro-batch, rank).
        Raises ValueError where the text is not longer than ``context``.
        """
        num_starts = len(self.tokens_N) - context
        if num_starts < 1:
            shorter = f", or context <= {len(self.tokens_N) - 1}" if len(self.tokens_N) > 2 else ""
            raise ValueError(
                f"context={context} needs {context + 1} tokens of text but there are {len(self.tokens_N)}; "
                f"use a longer text{shorter}"
            )
        start_B = torch.randint(num_starts, (batch,), generator=generator_of("batch", seed, step, micro_batch, rank))
        window_BC = self.tokens_N[start_B[:, None] + torch.arange(context + 1)].long()
        return window_BC[:, :-1], window_BC[:, 1:]


def load_text(library: Path | None = None, max_bytes: int = MAX_BYTES) -> Text:
    """The first ``max_bytes`` of the ``.py`` files of Python's standard library, in the order of their relative names.

    The same bytes on every machine with the same release of Python. ``library``: another folder than that of the
    running Python. Raises FileNotFoundError where it holds no source code, as where Python comes in one file.
    """
    library = Path(sysconfig.get_path("stdlib")) if library is None else library
    text = bytearray()
    for path in _sources(library):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(
            f"no .py files in {library}, where this Python's standard library should be; training needs their text, "
            "so use a Python that is installed with its sources"
        )
    return Text(torch.frombuffer(text, dtype=torch.uint8)[:max_bytes])


def generator_of(*purpose: object) -> torch.Generator:
    """A random generator for one purpose, which the arguments name; another for any other."""
    digest = hashlib.sha256(repr(purpose).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def _sources(library: Path) -> Iterator[Path]:
    """Regular .py files, sorted by relative name with forward slashes, as the order of folders on disk is not one."""
    by_name = {}
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        paths = [Path(folder, name) for name in files if name.endswith(".py") and not name.startswith(SKIPPED_PREFIXES)]
        by_name.update({path.relative_to(library).as_posix(): path for path in paths})
    for _, path in sorted(by_name.items()):
        if path.is_file() and not path.is_symlink():
            yield path
