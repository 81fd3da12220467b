"""What every reader and decoder of videos raises; apart from PyAV, which may be missing where DALI decodes all."""


class VideoError(Exception):
    """A video cannot be decoded; the message is the reason."""
