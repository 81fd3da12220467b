import adamae.common  # noqa: F401  # before torch: see there
