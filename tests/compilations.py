"""What jax compiles."""

import logging
from contextlib import contextmanager

import jax


@contextmanager
def compilations():
    """A list that grows by a message for each compilation."""
    found = []

    class Keep(logging.Handler):
        def emit(self, record):
            if "Compiling" in record.getMessage():
                found.append(record.getMessage())

    logger, keep = logging.getLogger("jax"), Keep()
    logger.addHandler(keep)
    try:
        with jax.log_compiles():
            yield found
    finally:
        logger.removeHandler(keep)
