"""How inner loops of planners and simulators are compiled: by numba, once a machine; the machine code is kept on disk.

numba looks at the file of a function to see whether its machine code is old, but compiled functions contain those that
they call, from other files of their room as well. So a room's code is kept in a directory whose name is a digest of all
these files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import config, njit


@cache
def cache_dir(folder: Path) -> str:
    """Returns where a folder's room keeps its machine code: below NUMBA_CACHE_DIR where that is set, else beside its
    byte code, or in the user's cache. The room is the package just below the topmost one.

    Directories of older machine code, and nothing else, are removed when there is new code to keep. Empty where none of
    these can be written to.
    """
    room = folder
    while (room.parent.parent / "__init__.py").exists():
        room = room.parent
    # How functions are compiled is no part of what numba looks at either.
    digest = sha256(Path(__file__).read_bytes())
    for path in sorted(room.rglob("*.py")):
        source = path.read_bytes()
        if b"moesys.compiled import" in source:
            digest.update(source)
    # Not Path.home(), which raises where a user has none.
    of_user = os.path.expanduser("~/.cache/moesys")
    places = (os.environ.get("NUMBA_CACHE_DIR"), room / "__pycache__", of_user)
    for place in places:
        if place is not None and os.access(Path(place) if Path(place).exists() else Path(place).parent, os.W_OK):
            found = Path(place) / f"{room.name}-{digest.hexdigest()[:16]}"
            if not found.exists():
                for older in Path(place).glob(f"{room.name}-{'[0-9a-f]' * 16}"):
                    shutil.rmtree(older, ignore_errors=True)
            return str(found)
    return ""


def _kept(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        settings = vars(config)
        before = settings["CACHE_DIR"]
        settings["CACHE_DIR"] = cache_dir(Path(function.__code__.co_filename).parent) or before
        try:
            return njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:
            # Nowhere to keep it: it is compiled by every process.
            return njit(nogil=True, **options)(function)
        finally:
            settings["CACHE_DIR"] = before

    return decorate


compiled = _kept()

# For loops that allocate no array: references to those they are given are not counted, which took half of a split's
# time. They must not give one back.
borrowing = _kept(_nrt=False)

# The same for small functions in inner loops.
inlined = _kept(inline="always")
