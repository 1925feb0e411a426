"""The torch.compile backend named ``reroll``."""
