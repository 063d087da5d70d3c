"""A small language model whose MLPs are grouped_experts.MoE layers, and what it takes to train it."""
