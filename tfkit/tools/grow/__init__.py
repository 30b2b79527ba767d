"""The start of a larger model that computes the function of a trained model, and the proof."""
