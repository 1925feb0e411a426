"""reroll: back-propagation through time inside a memory budget, as a torch.compile backend."""

__version__ = "0.1.0"
