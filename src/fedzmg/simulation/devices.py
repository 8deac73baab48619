"""The devices that this machine has."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from fedzmg.errors import InputError, unknown

Device = Literal["auto", "cpu", "cuda"]


def has_gpu() -> bool:
    """Whether this machine has a CUDA device."""
    return torch.cuda.is_available()


def other_devices(device: torch.device) -> list[torch.device]:
    """The other GPUs that work is spread over; CUDA_VISIBLE_DEVICES limits them."""
    if device.type != "cuda":
        return []
    first = device.index or 0
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != first]


def resolve_device(device: str) -> torch.device:
    """The device that ``auto`` stands for, or the named one.

    Raises:
        InputError: for an unknown name or a device this machine does not have.
    """
    if device not in get_args(Device):
        raise unknown("device", device, get_args(Device))
    if device == "cuda" and not has_gpu():
        raise InputError("device 'cuda': no CUDA device is available here; use --device cpu")
    if device == "auto":
        device = "cuda" if has_gpu() else "cpu"
    return torch.device(device)
