"""What goes beyond the paper's sampling: sharper draws, a ranking loss, motion, and a decoder that predicts a share."""

import pytest
import torch
from material import random_clip, small

from common.errors import InputError
from model.adamae import AdaMAE
from model.decoder_masking import reconstructed, running_cell
from model.motion import log_motion
from model.ranking import ranking_loss
from model.token_samplers import Draw
from training.config import parse
from training.schedule import Horizon


def test_the_ramp_goes_by_a_clips_place_in_the_run_and_ends_in_evaluation() -> None:
    sampler = AdaMAE(small(sampling_sharpness=5.0, sharpness_ramp=100)).token_sampler
    logits = torch.zeros(2, 4)
    assert sampler.draw._sharpness(logits, 50).tolist() == pytest.approx([3.0, 3.04])
    assert sampler.draw._sharpness(logits, torch.tensor(100)).tolist() == [5, 5]
    assert sampler.eval().draw._sharpness(logits, 0).tolist() == [5, 5]


def test_a_ranking_goes_by_the_order_of_the_errors_alone() -> None:
    scores = torch.tensor([[0.3, -1.0, 2.0, 0.5]]).log_softmax(-1).requires_grad_()
    ids, errors = torch.tensor([[0, 2, 3]]), torch.tensor([[0.1, 0.9, 0.4]])
    loss = ranking_loss(scores, ids, errors)
    p = scores.detach().exp()[0]
    chance = p[2] / (p[2] + p[3] + p[0]) * p[3] / (p[3] + p[0])  # the hardest first, then the next
    assert loss.item() == pytest.approx(-chance.log().item() / 3)
    assert ranking_loss(scores, ids, 10 + errors / 100).item() == pytest.approx(loss.item())
    loss.backward()
    assert scores.grad[0, 2] < 0 < scores.grad[0, 0]  # the hardest gains, the easiest loses
    assert scores.grad[0, 1] == 0  # visible


def test_a_ranking_teaches_the_sampler_and_nothing_else() -> None:
    config = small(sampling_objective="ranking")
    model = AdaMAE(config)
    output = model(random_clip(config), 0, 0)
    output.sampling_loss.backward()
    taught = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert taught == {"token_sampler"}


def test_motion_is_the_difference_to_the_neighbouring_token_frames() -> None:
    clip = torch.full((1, 6, 16, 16, 3), 100, dtype=torch.uint8)
    clip[:, 2:4, :8, 8:] = 60  # darker for one token frame, in one patch
    logits = log_motion(clip, tubelet_size=2, patch_size=8).view(3, 2, 2)
    moved = torch.tensor([40.0, 40.0, 40.0]).log1p()
    torch.testing.assert_close(logits[:, 0, 1], moved)
    assert logits[:, 0, 0].tolist() == logits[:, 1, 1].tolist() == [0, 0, 0]


def test_masking_by_motion_shows_what_moves_and_learns_no_sampler() -> None:
    config = small(masking="motion", sampling_sharpness=8.0)
    clip = torch.full((1, config.num_frames, *config.frame_size, 3), 90, dtype=torch.uint8)
    clip[:, ::2, : config.patch_size, : config.patch_size] = 250
    clip[:, config.tubelet_size :, : config.patch_size, : config.patch_size] //= 2
    output = AdaMAE(config)(clip, 0, 0)
    most = log_motion(clip, config.tubelet_size, config.patch_size)[0].argmax()
    assert most in output.visible_ids
    assert output.sampling_loss == 0
    assert output.log_probs.argmax() == most


def test_a_prior_is_added_to_what_the_sampler_says() -> None:
    clip = random_clip(small())
    torch.manual_seed(0)
    plain = AdaMAE(small()).eval()
    torch.manual_seed(0)
    with_prior = AdaMAE(small(motion_prior=True)).eval()
    added = log_motion(clip, plain.config.tubelet_size, plain.config.patch_size)
    expected = (plain(clip, 0, 0).log_probs + added).log_softmax(-1)
    torch.testing.assert_close(with_prior(clip, 0, 0).log_probs, expected)


@pytest.mark.parametrize("choice", ["random", "running-cell", "probability"])
def test_a_decoder_predicts_a_share_in_training_and_all_in_evaluation(choice) -> None:
    config = small(decoder_share=0.5, decoder_choice=choice)
    model, clip = AdaMAE(config), random_clip(config)
    all_hidden = model.eval()(clip, 0, 0)
    model.train().token_sampler.eval()  # dropout would change P
    some = model(clip, 0, 0)
    hidden = config.num_tokens - config.num_visible
    assert all_hidden.masked_ids.shape[1] == hidden
    assert some.masked_ids.shape[1] == some.pred.shape[1] == config.num_reconstructed == hidden // 2
    for row, shown in zip(some.masked_ids, some.visible_ids, strict=True):
        assert len(set(row.tolist()) | set(shown.tolist())) == len(row) + len(shown)
        assert (row.diff() > 0).all()
    some.loss.backward()
    again = model(clip, 0, 0)
    assert torch.equal(again.masked_ids, some.masked_ids)
    assert not torch.equal(model(clip, 1, 0).masked_ids, some.masked_ids)


def test_the_loss_of_a_random_share_is_an_unbiased_estimate_of_the_whole() -> None:
    config = small(masking="random", decoder_share=0.25)
    model, clip, times = AdaMAE(config), random_clip(config, batch_size=1), 600
    with torch.no_grad():
        whole = model.eval()(clip, 3, 0)
    draw = Draw(*(ids.expand(times, -1) for ids in (whole.visible_ids, whole.masked_ids)), None)
    chosen = reconstructed(draw, config, 7, 0)
    counts = torch.bincount(chosen.flatten(), minlength=config.num_tokens)[whole.masked_ids[0]].double()
    share = config.num_reconstructed / len(counts)
    z = (counts - times * share) / (times * share * (1 - share)) ** 0.5
    assert z.abs().max() < 4
    errors = torch.zeros(config.num_tokens).scatter(0, whole.masked_ids[0], whole.loss_per_token[0])
    estimates = errors[chosen].mean(dim=1)
    assert (estimates.mean() - whole.reconstruction_loss).abs() < 4 * estimates.std() / times**0.5


def test_a_running_cell_changes_its_colours_with_every_token_frame() -> None:
    cell = running_cell((2, 2, 3), torch.device("cpu")).view(2, 2, 3)
    assert cell[0].tolist() == [[1, 0, 1], [0, 1, 0]]
    assert torch.equal(cell[1], 1 - cell[0])
    config = small(masking="random", decoder_share=0.4, decoder_choice="running-cell")
    ids = AdaMAE(config)(random_clip(config), 0, 0).masked_ids
    assert running_cell(config.grid, ids.device)[ids].all()  # there are enough on the cell


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["model.sampling_sharpness=0"], "sampling_sharpness is 0"),
        (["model.sampling_sharpness=.inf"], "sampling_sharpness is inf"),
        (["model.sampling_sharpness=2", "model.sharpness_ramp=-1"], "sharpness_ramp is -1"),
        (["model.sharpness_ramp=5"], "sharpness_ramp does nothing with model.sampling_sharpness=1"),
        (["model.masking=random", "model.sampling_sharpness=2"], "does nothing with model.masking=random"),
        (["model.masking=motion", "model.motion_prior=true"], "motion_prior does nothing with model.masking=motion"),
        (["model.masking=motion", "model.num_frames=2"], "has only one: raise model.num_frames"),
        (["model.motion_prior=true", "model.num_frames=2"], "has only one: raise model.num_frames"),
        (["model.decoder_share=0"], "decoder_share is 0"),
        (["model.decoder_share=1.5"], "decoder_share is 1.5"),
        (["model.decoder_share=0.0001"], "leaves none of 1490 masked tokens"),
        (["model.decoder_choice=running-cell"], "decoder_choice does nothing with model.decoder_share=1"),
        (
            ["model.masking=tube", "model.decoder_share=.5", "model.decoder_choice=probability"],
            "needs probabilities, which tube masking has not",
        ),
    ],
)
def test_what_makes_no_sense_is_one_sentence(settings, says) -> None:
    with pytest.raises(InputError) as raised:
        parse(["data.shards=s", *settings])
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_ramp_longer_than_the_run_is_refused() -> None:
    settings = ["data.shards=s", "steps=10", "batch_size=4", "model.sampling_sharpness=2", "optimizer.warmup_epochs=0"]
    Horizon.of(parse([*settings, "model.sharpness_ramp=40"]), 100, 1)
    with pytest.raises(InputError, match=r"takes 41 clips and the run only 40"):
        Horizon.of(parse([*settings, "model.sharpness_ramp=41"]), 100, 1)
