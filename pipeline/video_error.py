"""What every reader and decoder of videos raises."""


class VideoError(Exception):
    """A video cannot be decoded; the message is the reason."""
