"""The scripts beside the tests of this folder import each other by name; so do the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
