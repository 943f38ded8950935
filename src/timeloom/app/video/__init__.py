"""Video clips as series: the features that a ResNet finds in their frames, computed once and kept."""

from timeloom.app.video.clips import holds_clips
from timeloom.app.video.source import Video, load_video, prepare_video, read_clips

__all__ = ["Video", "holds_clips", "load_video", "prepare_video", "read_clips"]
