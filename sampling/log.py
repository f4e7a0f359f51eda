"""Log: where messages for the user go. sample.py passes its console's log. By default, they go to Python's logging."""
import logging
from collections.abc import Callable

Log = Callable[[str], None]

info: Log = logging.getLogger("sampling").info
warn: Log = logging.getLogger("sampling").warning
