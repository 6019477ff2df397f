"""Early exits of the target: its first layers as a draft or a companion (LayerSkip)."""
