# Sets how OpenMP waits, which it reads when torch is imported.
import adamae.common  # noqa: F401
