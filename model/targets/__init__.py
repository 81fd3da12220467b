"""What the decoder predicts; `model.registry.TARGETS` names them."""
