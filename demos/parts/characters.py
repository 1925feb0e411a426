"""A GPT of characters, of torch's own blocks, and Python's sources for it to read."""

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


class CharacterGPT(nn.Module):
    """Blocks of torch's own over characters. Shape letters: B batch, S characters, C channels."""

    def __init__(self, blocks: int, width: int, length: int, heads: int = 4) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(len(CHARACTERS), width), nn.Embedding(length, width)
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(blocks)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text_BS: Tensor) -> Tensor:
        """Logits of each next character, (B, S, characters)."""
        length = text_BS.shape[1]
        x_BSC = self.embedding(text_BS) + self.places.weight[:length]
        mask_SS = self.get_buffer("mask")[:length, :length]
        for block in self.blocks:
            x_BSC = block(x_BSC, src_mask=mask_SS, is_causal=True)
        logits_BSK: Tensor = self.head(self.norm(x_BSC))
        return logits_BSK


def library() -> Tensor:
    """Python's licence, where it is installed, and the sources of its library, as numbers of characters."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / "LICENSE.txt", *sorted(folder.glob("*.py"))]
    text = "\n".join(file.read_text("utf-8", errors="ignore") for file in files if file.exists())
    numbers = {character: number for number, character in enumerate(CHARACTERS)}
    return torch.tensor([numbers[character] for character in text if character in numbers])


def batch(text_N: Tensor, count: int, length: int) -> Tensor:
    """Pieces of the text, each with the character that follows: (B, S + 1)."""
    starts = torch.randint(len(text_N) - length - 1, (count,))
    return torch.stack([text_N[start : start + length + 1] for start in starts.tolist()])


def loss_of(model: Any, text_BS: Tensor) -> Tensor:
    """Cross entropy of each next character."""
    return cross_entropy(model(text_BS[:, :-1]).flatten(0, 1), text_BS[:, 1:].flatten())


def step(model: Any, text_BS: Tensor) -> None:
    loss_of(model, text_BS).backward()


@torch.no_grad()
def write(network: nn.Module, begin: str, count: int, length: int) -> str:
    """Text that the network goes on with."""
    written = [CHARACTERS.index(character) for character in begin]
    for _ in range(count):
        logits_K = network(torch.tensor([written[-length:]]))[0, -1]
        written.append(int(torch.multinomial(torch.softmax(logits_K / 0.8, 0), 1)))
    return "".join(CHARACTERS[number] for number in written)
