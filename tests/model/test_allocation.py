"""Which tokens are visible by group: allocation by rank, hiding the hard ones, and the oracle of motion."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from material import random_clip, small
from torch import Tensor

from common.errors import InputError
from model.adamae import AdaMAE
from model.masking import Mask, make_masking
from model.masking.mask import descending_ranks, sample_in_groups
from shard_tools import make_shards, synthetic_videos
from train import train
from training.config import parse

LOGITS = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))


def sample(logits: Tensor, rows: int = 400, offset: int = 0, **changes: Any) -> Mask:
    return make_masking(small(**changes)).sample(logits.expand(rows, -1), 0, offset)


def count_in(ids: Tensor, marked: Tensor) -> list[int]:
    return marked.gather(1, ids).sum(dim=1).unique().tolist()


def test_groups_get_their_numbers_and_tokens_are_sampled_by_probability_in_each() -> None:
    stats = pytest.importorskip("scipy.stats")
    first = (torch.arange(32) % 4 == 0).expand(4000, -1)
    visible, masked = sample_in_groups(LOGITS.expand(4000, -1), first, 1, 2, 0, 0)
    assert torch.equal(torch.cat((visible, masked), 1).sort().values, torch.arange(32).expand(4000, -1))
    for ids in (visible, masked):
        assert (ids.diff() > 0).all()
    assert count_in(visible, first) == [1]
    for group in (first[0], ~first[0]):
        counts = torch.bincount(visible.flatten(), minlength=32)[group].double()
        expected = LOGITS[0, group].double().softmax(0) * 4000
        assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3
    both = [sample_in_groups(LOGITS.expand(n, -1), first[:n], 1, 2, 0, o)[0] for n, o in ((4, 0), (2, 2))]
    assert torch.equal(both[0][2:], both[1]), "a clip's noise does not depend on its batch"


def test_a_group_that_is_too_small_is_visible_as_a_whole() -> None:
    few = torch.arange(32).expand(3, -1) < torch.tensor([[0], [2], [32]])
    visible, _ = sample_in_groups(torch.zeros(3, 32), few, 4, 8, 0, 0)
    assert few.gather(1, visible).sum(dim=1).tolist() == [0, 2, 8]


def test_allocation_by_rank_does_not_depend_on_how_much_probabilities_differ() -> None:
    top = descending_ranks(LOGITS) < 8
    chosen = {"sampling_allocation": "rank", "allocation_quantile": 0.25, "allocation_share": 0.375}
    for contrast in (0.01, 1, 100):
        mask = sample(contrast * LOGITS, **chosen)
        assert count_in(mask.visible_ids, top.expand(400, -1)) == [3]
        torch.testing.assert_close(mask.log_probs[0], (contrast * LOGITS[0]).log_softmax(0))
    for share, visible in ((0, 0), (1, 8)):
        mask = sample(LOGITS, **chosen | {"allocation_share": share})
        assert count_in(mask.visible_ids, top.expand(400, -1)) == [visible]
    model = AdaMAE(small(**chosen))
    output = model(random_clip(small()), 0, 0)
    output.loss.backward()
    assert output.sampling_loss > 0
    assert model.with_masking(masking="random").config.sampling_allocation == "probability"


def test_hard_tokens_are_hidden_more_and_more() -> None:
    hard = (descending_ranks(LOGITS) < 12).expand(100, -1)  # half of 24 masked ones
    assert count_in(sample(LOGITS, 100, masking="hard").visible_ids, hard) == [0]
    mask = sample(LOGITS, 100, masking="hard", hard_warmup_clips=100)
    hidden = [hard[0].gather(0, ids).sum().item() for ids in mask.masked_ids]
    assert all(count >= round((clip + 1) / 100 * 12) for clip, count in enumerate(hidden))
    assert hidden[0] < hidden[-1] == 12
    later = sample(LOGITS, 1, offset=60, masking="hard", hard_warmup_clips=100)
    assert torch.equal(later.visible_ids[0], mask.visible_ids[60])
    all_of_them = sample(LOGITS, masking="hard", hard_share=1)
    assert torch.equal(all_of_them.masked_ids[0].sort().values, LOGITS[0].argsort()[8:].sort().values)
    output = AdaMAE(small(masking="hard"))(random_clip(small()), 0, 0)
    assert output.sampling_loss > 0
    torch.testing.assert_close(output.log_probs.exp().sum(1), torch.ones(2))


def moving_clip() -> Tensor:
    """A quarter of the tokens moves: those of the upper left quarter; neighbors are covered by less than half."""
    clip = random_clip(small(motion_channel=True))
    clip[..., 3] = 0
    clip[:, :, 1:17, 2:18, 3] = 255
    return clip


@pytest.mark.parametrize(("share", "moving"), [(0, 0), (0.25, 2), (0.5, 4), (1, 8)])
def test_an_oracle_shows_a_set_share_of_what_moves(share: float, moving: int) -> None:
    config = small(masking="oracle", oracle_share=share, motion_channel=True)
    model, clip = AdaMAE(config), moving_clip()
    output = model(clip, 0, 0)
    in_quarter = (torch.arange(32) % 16 // 4 < 2) & (torch.arange(32) % 4 < 2)
    assert in_quarter[output.visible_ids].sum(dim=1).tolist() == [moving] * 2
    blind = clip.clone()
    blind[..., 3] = 0
    assert torch.equal(model.encode(clip).tokens, model.encode(blind).tokens), "the model does not see the map"
    assert model.reconstruct(clip).frames.shape[-1] == 3
    randomly = model.with_masking(masking="random")
    assert torch.equal(randomly(clip, 0, 0).loss_per_token, randomly(blind, 0, 0).loss_per_token)


def test_a_run_with_an_oracle_and_a_probe_of_it(tmp_path: Path) -> None:
    """On synthetic videos whose fourth channel is where something moves."""
    videos, shards = tmp_path / "videos", tmp_path / "shards"
    made = "--dataset=motion --num-videos=8 --size=32 --num-frames=8 --codec=npy --classes up left".split()
    synthetic_videos.main([str(videos), *made, "--motion-channel"])
    plain = tmp_path / "plain"
    synthetic_videos.main([str(plain), *made])
    video = np.load(videos / "up/video_000000.npy")
    assert np.array_equal(video[..., :3], np.load(plain / "up/video_000000.npy"))
    assert set(np.unique(video[..., 3])) == {0, 255}
    changed = (video[1:, ..., :3] != video[:-1, ..., :3]).any(-1)
    assert (np.maximum(video[1:, ..., 3], video[:-1, ..., 3])[changed] == 255).mean() > 0.95
    assert make_shards.main([str(videos), str(shards), "--frame-stride=1", "--workers=1"]) == 0
    given = [
        "model.size=tiny", "model.num_frames=4", "model.image_size=32", "model.patch_size=8", "model.mask_ratio=0.75",
        "model.motion_channel=true", "data.frame_stride=2", "data.crop=random_resized", "batch_size=4", "steps=2",
        "precision=fp32", "device=cpu", "data.num_workers=1", "evaluation.every=2", f"evaluation.shards={shards}",
    ]  # fmt: skip
    run = tmp_path / "run"
    train(parse([*given, f"data.shards={shards}", "model.masking=oracle", f"run={run}"]))
    train(
        parse([*given, f"data.shards={shards}", "task=linear_probe", f"init_from={run}", f"run={tmp_path / 'probe'}"])
    )
    rgb = tmp_path / "rgb"
    assert make_shards.main([str(plain), str(rgb), "--frame-stride=1", "--workers=1"]) == 0
    with pytest.raises(InputError, match=r"the clips of data\.shards have 3 channels instead of 3 and a map of motion"):
        train(parse([*given, f"data.shards={rgb}", "model.masking=oracle", f"run={tmp_path / 'other'}"]))
    with pytest.raises(InputError, match="--motion-channel needs --codec npy"):
        synthetic_videos.main([str(videos), "--motion-channel"])
