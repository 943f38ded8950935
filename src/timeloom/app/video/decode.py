"""Frames of a clip, by PyAV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from timeloom.app.errors import InputError

LEAST_SHARE = 0.9
"""Share of the frames promised by the file's header that must come out; headers are often off by a few."""


def read_frames(path: Path, count: int, size: int) -> Tensor:
    """The first `count` frames or all there are, scaled to `size` × `size`: `(N, 3, size, size)` uint8, RGB."""
    import av

    frames: list[numpy.ndarray] = []
    # from PyAV 19 on, titles in unknown encodings are no errors, and the option is gone
    lenient: dict[str, Any] = {} if int(av.__version__.split(".")[0]) >= 19 else {"metadata_errors": "replace"}
    try:
        with av.open(str(path), **lenient) as container:
            if not container.streams.video:
                raise EOFError("it holds no video")
            stream = container.streams.video[0]
            promised = min(stream.frames, count)
            for frame in container.decode(stream):
                scaled = frame.reformat(width=size, height=size, format="rgb24", interpolation="BILINEAR")
                frames.append(scaled.to_ndarray())
                if len(frames) == count:
                    break
    except (av.error.FFmpegError, OSError, EOFError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{path}: cannot be decoded ({said}, after {len(frames)} frames); get it again or remove it"
        ) from None
    if not frames or len(frames) < LEAST_SHARE * promised - 1:
        raise InputError(
            f"{path}: {len(frames)} frames come out of it where its header promises at least {promised}: the file is "
            f"cut short; get it again or remove it"
        )
    return torch.from_numpy(numpy.stack(frames)).permute(0, 3, 1, 2).contiguous()
