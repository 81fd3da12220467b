"""Views of a video: their loss by hand, who is compared with whom, and models without a decoder."""

import math

import pytest
import torch
from material import close, random_clip, small

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.views import TEMPERATURE, Views, compute_infonce

VIEWS = {"views": 2, "masking": "random"}


def test_infonce_by_hand() -> None:
    """Two videos of two views, whose projections are unit vectors whatever their lengths."""
    similarity = 0.8
    angle = math.acos(similarity)
    first = torch.tensor([[1.0, 0, 0], [3 * math.cos(angle), 3 * math.sin(angle), 0]])
    second = torch.tensor([[0, 0, 2.0], [0, 0, 0.5]])
    # Views of the other video have a similarity of 0, and there are two of them.
    others = 2.0
    by_hand = []
    for pair in (similarity, similarity, 1.0, 1.0):
        score = math.exp(pair / TEMPERATURE)
        by_hand.append(-math.log(score / (score + others)))
    loss = compute_infonce(torch.stack((first, second)))
    assert loss.item() == pytest.approx(sum(by_hand) / 4, rel=1e-5)


def test_infonce_of_equal_projections_is_that_of_a_guess() -> None:
    loss = compute_infonce(torch.ones(8, 3, 5))
    assert loss.item() == pytest.approx(math.log(1 + 7 * 3), rel=1e-5)


def test_only_neighbors_in_the_batch_are_views_of_one_video() -> None:
    torch.manual_seed(0)
    module = Views(small(**VIEWS))
    features = torch.randn(3, 1, 1, 48).expand(3, 2, 4, 48).flatten(0, 1).contiguous()
    swapped = features[[0, 2, 1, 3, 4, 5]]
    assert module(features) < 0.1 < module(swapped)
    # Other videos come in any order.
    close(module(features[[4, 5, 0, 1, 2, 3]]), module(features))


def test_views_are_compared_in_training_beside_or_instead_of_predictions() -> None:
    clip = random_clip(small(), batch_size=4)
    both = AdaMAE(small(**VIEWS, views_weight=0.5))
    output = both(clip, 0, 0)
    assert output.loss == output.reconstruction_loss + 0.5 * output.views_loss
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in both.parameters())
    alone = AdaMAE(small(**VIEWS, target="none"))
    assert alone.decoder is None
    assert not any(name.startswith("decoder") for name in alone.state_dict())
    output = alone(clip, 0, 0)
    assert output.loss == 0.25 * output.views_loss
    assert output.pred.shape == (4, 0, 0)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in alone.parameters())
    # Evaluations have one clip of a video, in batches of any size.
    output = both.eval()(clip[:3], 0, 0)
    assert output.views_loss == 0
    assert output.loss == output.reconstruction_loss


def test_with_views_the_sampler_learns_from_predictions() -> None:
    config = small(views=2, masking="adaptive", sampling_loss_weight=1.0)
    model = AdaMAE(config)
    output = model(random_clip(config, batch_size=4), 0, 0)
    assert output.loss == output.reconstruction_loss + output.sampling_loss + (
        0.25 * output.views_loss
    )
    (gradient,) = torch.autograd.grad(output.loss, [model.token_sampler.logit.weight])
    assert gradient.abs().max() > 0


def test_the_same_model_with_another_masking_keeps_its_projector() -> None:
    model = AdaMAE(small(**VIEWS, target="none"))
    changed = model.with_masking(masking="tube", mask_ratio=0.5)
    assert changed.views is model.views
    assert changed.decoder is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target": "none"}, "leaves nothing to learn from: set model.views to 2 or more"),
        ({"target": "none", "views": 2, "masking": "adaptive"}, "model.masking=adaptive learns"),
        ({"target": "none", **VIEWS, "decoder_share": 0.5}, "model.decoder_share does nothing"),
        ({"views": 0}, "views is 0: must be at least 1"),
    ],
)
def test_settings_that_do_not_go_together_are_one_sentence(
    changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        small(**changes)
