"""Entry point of an Attempt's container: puts the import path in order, then hands over to `attempt.run`.

Started as `python -I …/lib/outerproduct_runner`. The folder that Python itself put on the import path goes away
again, since modules such as `frames` must not be importable by these names; `lib/` ends up last, so that the SDK in it
is found only where the image has none.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    lib = Path(__file__).resolve().parent.parent
    sys.path[0] = str(lib)
    from outerproduct_runner import attempt

    del sys.path[0]
    attempt.run(lib)
