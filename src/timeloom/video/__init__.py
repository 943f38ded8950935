"""Video clips as series: the features that a ResNet finds in their frames, computed once and kept."""

from timeloom.video.source import Video, load_video

__all__ = ["Video", "load_video"]
