"""The paper's figure of two fixed clips, drawn now and then: one sees a run learn."""

from collections.abc import Iterator

import torch

from figures import drawing
from figures.clips import Clip, read_clips
from model.adamae import AdaMAE
from pipeline.shards.dataset import ShardDataset
from training.config import TrainConfig
from training.reviews.metrics import Metrics

NUM_CLIPS = 2
WIDTH = 1000  # pixels of a picture: there are many of them in a run


class FigurePanel:
    """Reads the clips once and draws them whenever it is asked to."""

    def __init__(self, model: AdaMAE, config: TrainConfig) -> None:
        self.model = model
        self.clips = list(_clips(config))

    def draw(self, step: int, metrics: Metrics) -> None:
        device = next(self.model.parameters()).device
        for clip in self.clips:
            with torch.compiler.set_stance("force_eager"):  # one clip without gradient is no graph worth compiling
                maps = self.model.reconstruct(clip.frames[None].to(device))
            rows, config = drawing.figure_rows(maps), self.model.config
            picture = drawing.picture(rows, config.tubelet_size, clip.times, drawing.note_on(config), WIDTH)
            metrics.show(clip.name, picture, step)


def _clips(config: TrainConfig) -> Iterator[Clip]:
    clip_shape = config.model.num_frames, config.model.image_size
    shards = config.evaluation.shards or config.data
    dataset = ShardDataset.open(shards, config.data)
    return read_clips([dataset], *clip_shape, config.data.frame_stride, limit=NUM_CLIPS)
