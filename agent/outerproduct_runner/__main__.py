"""Entry point: the container's command is `python -I -u /run/outerproduct/lib/outerproduct_runner`.

Python puts this folder in front of the import path; it is taken off again, so that nothing of ours shadows a module
of the image.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY = os.path.dirname(HERE)

sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
sys.path.insert(0, LIBRARY)

from outerproduct_runner.runner import main  # noqa: E402

# Last on the path: the SDK and cloudpickle there serve only where the image has none of its own.
sys.path.remove(LIBRARY)
sys.path.append(LIBRARY)

sys.exit(main())
