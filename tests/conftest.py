"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No verdict may depend on how fast the machine is: hypothesis builds its tables of characters inside a test.
settings.register_profile("engram", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("engram")
