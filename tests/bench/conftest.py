"""The benchmark is a folder of scripts, not a package: its modules are found by the folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
