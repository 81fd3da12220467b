"""Masking strategies; `model.registry.MASKS` names them."""
