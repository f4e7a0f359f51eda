"""Tables of test cases. Some cases run only with --slow."""
from itertools import product

import pytest


def cases(*axes, quick):
    """All combinations of the axes, for parametrize. A case is slow if quick(*values) is false."""
    return [pytest.param(*values, marks=[] if quick(*values) else pytest.mark.slow, id="-".join(map(str, values)))
            for values in product(*axes)]
