"""The environment variable ``FP8CUTLASS_LOG``: subjects to log, separated by commas or blanks.

A subject is the last part of a logger's name; its lines are at INFO.

* ``fp8cutlass.dispatch``: each new decision of the dispatch table.
* ``fp8cutlass.fallback``: the first call that a door does not serve, for each module class and reason.

The variable is read once, when the module that has something to say is imported. Where the program has set up no
handler, lines go to standard error.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from functools import cache

VARIABLE = "FP8CUTLASS_LOG"
SUBJECTS = ("dispatch", "fallback")


class _LastResort(logging.StreamHandler):
    """Standard error, as long as no other handler would hear the record."""

    def emit(self, record: logging.LogRecord) -> None:
        heard: logging.Logger | None = logging.getLogger(record.name)
        while heard is not None:
            if any(handler is not self for handler in heard.handlers):
                return
            heard = heard.parent if heard.propagate else None
        super().emit(record)


def words(text: str) -> tuple[list[str], list[str]]:
    """The subjects that the value of the variable names, and the words that are none."""
    given = list(dict.fromkeys(word for word in re.split(r"[,\s]+", text.strip()) if word))
    return [word for word in given if word in SUBJECTS], [word for word in given if word not in SUBJECTS]


def unknown_words(unknown: list[str]) -> str:
    """What to tell the user about words that are no subject."""
    return f"{VARIABLE} names {', '.join(map(repr, unknown))}, which is no subject; known are {', '.join(SUBJECTS)}"


@cache
def _requested(text: str) -> frozenset[str]:
    known, unknown = words(text)
    if unknown:
        warnings.warn(unknown_words(unknown), UserWarning, stacklevel=3)
    return frozenset(known)


def requested(subject: str) -> logging.Logger | None:
    """The logger ``fp8cutlass.<subject>``, ready to be heard at INFO, or None where the variable does not name it.

    Words that are no subject are warned about by name, once.
    """
    if subject not in _requested(os.environ.get(VARIABLE, "")):
        return None
    logger = logging.getLogger(f"fp8cutlass.{subject}")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _LastResort) for handler in logger.handlers):
        logger.addHandler(_LastResort())
    return logger
