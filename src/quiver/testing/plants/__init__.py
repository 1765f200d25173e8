"""Known bugs, to be planted: what the simulator must find, each a mistake that a real system had or nearly had.

A plant replaces methods of the product for as long as its `with` block lasts. The product has no hook for it: nothing
outside the simulator can turn one on.

Rule: a plant is one mistake, as small as it would be made.
"""

from quiver.testing.plants import consensus, groups, metadata, storage
from quiver.testing.plants.registry import PLANTS, Plant, planted

__all__ = ["PLANTS", "Plant", "consensus", "groups", "metadata", "planted", "storage"]
