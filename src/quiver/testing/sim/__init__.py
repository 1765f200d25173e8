"""The deterministic simulator: whole clusters of real brokers in one process, on virtual time, from one seed.

world → executor, disk, network → node → cluster; beside them clients that record a history, a nemesis that breaks
things, a ledger that holds every node to the rules of consensus after every event.

Rule: no threads, no real clock, no sockets, and no chance but what the seed gives: a seed is a run, exactly.
"""

from quiver.testing.sim.run import Outcome, run_seed
from quiver.testing.sim.world import Violation

__all__ = ["Outcome", "Violation", "run_seed"]
