"""What is asked of CUDA, seen by a stand-in for it: no card is needed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from reroll.backends.tiers.device import CudaDevice, background_of, device_of, home_of
from reroll.errors import UnsupportedError

CARD = torch.device("cuda", 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every call of CUDA, in order."""
    calls: list[Any] = []

    @contextmanager
    def entered(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        calls.append((name, *args, *kwargs.items()))
        yield
        calls.append(f"end of {name}")

    def named(name: str) -> Any:
        return lambda *args, **kwargs: entered(name, *args, **kwargs)

    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, named(name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: mock.Mock(replay=lambda: calls.append("replay")))
    monkeypatch.setattr(torch.cuda, "default_generators", [mock.Mock(), mock.Mock()])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"present stream of {device}")
    return calls


def test_copies_are_queued_on_the_stream_that_is_named(asked: list[Any]) -> None:
    target, source = mock.Mock(), mock.Mock()
    device = CudaDevice(CARD)
    device.copy(target, source, device.side())
    assert asked == [("stream", "stream of cuda:1"), "end of stream"]
    target.copy_.assert_called_once_with(source, non_blocking=True)
    assert str(device.present()) == "present stream of cuda:1"


def test_recordings_share_a_pool_and_a_stream_of_their_device(asked: list[Any]) -> None:
    device = CudaDevice(CARD)
    results: list[torch.Tensor | None] = [torch.ones(1), None]
    for _ in range(2):
        found, again = device.record(lambda: results)
        assert found is results
        again()
    graphs = [call for call in asked if call[0] == "graph"]
    assert len(graphs) == 2
    assert all(("pool", "pool") in call and ("stream", "stream of cuda:1") in call for call in graphs)
    assert all(("capture_error_mode", "thread_local") in call for call in graphs)
    assert asked.count("replay") == 2
    assert asked[0] == ("device", CARD)


def test_a_device_is_hashed_and_known_once() -> None:
    assert device_of(CARD) is device_of(torch.device("cuda:1"))
    assert device_of(CARD) != device_of(torch.device("cuda:0"))
    assert device_of(torch.device("cpu")) is None


def test_the_device_of_a_loop_is_the_one_that_works_in_the_background() -> None:
    here, there, other = (mock.Mock(device=torch.device(name)) for name in ("cpu", "cuda:1", "cuda:0"))
    assert home_of([here, there]) == CARD
    assert home_of([here, here]) == torch.device("cpu")
    assert background_of([here]) is None
    with pytest.raises(UnsupportedError, match="several devices \\(cuda:0, cuda:1\\)"):
        background_of([there, other])


@pytest.mark.parametrize(
    ("given", "capability", "nbytes"),
    [
        ("", (9, 0), 32 << 20),
        ("", (8, 0), (8 << 20) + (128 << 10)),
        (":16:8", (9, 0), 16 << 13),
        (":4:2:8:1", (7, 0), 16 << 10),
    ],
)
def test_workspaces_of_products_are_those_that_torch_makes(
    given: str, capability: tuple[int, int], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert CudaDevice(CARD).workspace() == nbytes


@pytest.mark.parametrize("waits", [True, False])
def test_work_that_waits_for_a_card_is_noticed_and_torch_is_left_as_it_was(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = [0]

    def set_mode(mode: int | str) -> None:
        if mode == "warn":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        modes.append(1 if mode == "warn" else int(mode))

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)

    def run() -> list[torch.Tensor | None]:
        warnings.warn("a word of the kernel's own", UserWarning, stacklevel=2)
        if waits and modes[-1] == 1:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=2)
        return [None]

    with pytest.warns(UserWarning, match="a word of") as told:
        assert CudaDevice(CARD).watched(run) == ([None], waits)
    assert [str(each.message) for each in told] == ["a word of the kernel's own"]
    assert modes == [0, 1, 0]
