"""How the clips of an optimizer step are dealt out to processes and, in each, to its forward passes."""

from common.errors import InputError


def split_step(clips: int, most: int, together: int, world_size: int, rank: int) -> list[range]:
    """The clips of a step, counted from 0, that a rank takes in each of its forward passes: `most` at most in one.

    All passes of all ranks hold the same number of groups of `together` clips or one less, so that no more than two
    shapes are compiled; ranks, too, differ by one group at most. The first passes of all ranks come first, and together
    the passes are the step, in its order. Raises InputError if a rank would have nothing to do.
    """
    groups, odd = divmod(clips, together)
    if odd:
        raise InputError(f"global_batch is {clips}: give a multiple of {together}, as so many clips stay in one batch")
    if groups < world_size:
        raise InputError(
            f"global_batch is {clips}, and each of {world_size} processes takes a multiple of {together} clips: start"
            " fewer processes, or raise global_batch"
        )
    rounds = -(-groups // (world_size * (most // together)))
    size, larger = divmod(groups, world_size * rounds)
    smaller = world_size * rounds - larger  # passes, which come first: an empty one is the first of its rank
    starts = [number * size + max(0, number - smaller) for number in range(world_size * rounds + 1)]
    mine = [
        range(starts[number] * together, starts[number + 1] * together)
        for number in range(rank, len(starts) - 1, world_size)
    ]
    return [part for part in mine if part]
