"""Makes ``serving_fakes`` importable under the import mode of the project."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
