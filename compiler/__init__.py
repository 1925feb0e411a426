"""reroll: back-propagation through time inside a memory budget, as a torch.compile backend."""
