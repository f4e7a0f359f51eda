"""Tables of test cases, of which only some run without --slow."""
from itertools import product

import pytest


def cases(*axes, quick):
    """All combinations of the axes, for parametrize. Those are slow for which quick(*values) is false."""
    return [pytest.param(*values, marks=[] if quick(*values) else pytest.mark.slow, id="-".join(map(str, values)))
            for values in product(*axes)]
