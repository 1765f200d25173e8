"""For all tests: an example that takes long says something about the machine, not about what is tested."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("quiver", deadline=None)
settings.load_profile("quiver")
